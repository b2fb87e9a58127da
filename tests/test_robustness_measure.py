"""Cell after cell through the network, or again from predictions."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from cells_of_noise import CPU, Loader, begun, network, run, write_finished

from fastmoll.distributed import Stop
from fastmoll.report.read import read_run
from fastmoll.robustness.measure import measure, rescore
from fastmoll.robustness.predictions import Predictions, read_predictions, write_predictions
from fastmoll.robustness.results import ALL, Cell, Results, cell_name
from fastmoll.scoring import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_finished(tmp_path_factory.mktemp("finished"))


def test_every_cell_has_the_figures_of_its_images_and_reports_can_read_them(finished: Path) -> None:
    found = read_run(finished)
    assert (found.source, found.data, found.count, found.mce) == ("official", "noise", 120, None)
    for cell in (None, ("gaussian_noise", 1), ("jpeg_compression", 5)):
        ours = found.clean if cell is None else found.cells[cell[0]][cell[1] - 1]
        theirs = evaluate(network(), Loader(cell))
        assert [[*row] for row in ours.reliability] == theirs.pop("reliability")
        assert {name: getattr(ours, name) for name in theirs} == theirs
    means = [cell.error for row in found.cells.values() for cell in row]
    assert found.corrupted["error"] == pytest.approx(sum(means) / 75, rel=1e-12)
    assert len(os.listdir(finished / "cells")) == 76


def test_an_interrupted_evaluation_loses_no_finished_cell_and_does_none_again(tmp_path: Path, finished: Path) -> None:
    results = begun(tmp_path / "out")

    def interrupt_third(cell: Cell) -> Loader:
        if cell == ALL[2]:
            raise KeyboardInterrupt
        return Loader(cell)

    with pytest.raises(KeyboardInterrupt):
        measure(CPU, network(), results, ALL, interrupt_third, num_classes=3)
    assert sorted(os.listdir(tmp_path / "out" / "cells")) == ["clean.json", "gaussian_noise-1.json"]
    assert results.finish() is None and not (tmp_path / "out" / "robustness.json").exists()
    # They are cut short and overwritten as by a failing disk: they are not done.
    cells = tmp_path / "out" / "cells"
    whole = json.loads((cells / "clean.json").read_text())
    (cells / "clean.json").write_text('{"error": 1')
    (cells / "gaussian_noise-1.json").write_text(json.dumps({**whole, "nll": None}))
    run(results, ALL[2:5])
    for cell, figures in zip(ALL[2:5], ({"error": -5}, {"count": 7}, {"ece": float("nan")}), strict=True):
        (cells / f"{cell_name(cell)}.json").write_text(json.dumps({**whole, **figures}))
    opened: list[Cell] = []
    results = begun(tmp_path / "out")
    run(results, opened=opened)
    assert opened == [None, *ALL]  # the first also to know how long it is
    assert results.finish() == json.loads((finished / "robustness.json").read_text())
    opened.clear()
    run(results, opened=opened)
    assert opened == []


def test_figures_come_again_from_predictions_alone(tmp_path: Path, finished: Path) -> None:
    for name in ("predictions", "settings.json"):
        (tmp_path / name).symlink_to(finished / name)
    results = Results.open(tmp_path)
    rescore(CPU, results)
    again = results.finish()
    before = json.loads((finished / "robustness.json").read_text())
    assert again is not None
    for name, cells in {**before["cells"], "clean": [before["clean"]]}.items():
        for ours, theirs in zip([again["clean"]] if name == "clean" else again["cells"][name], cells, strict=True):
            rows = ours.pop("reliability"), theirs.pop("reliability")
            torch.testing.assert_close(*map(torch.tensor, rows), rtol=1e-6, atol=0)
            assert ours == pytest.approx(theirs, rel=1e-6)


def test_rescoring_without_predictions_or_with_those_of_others_is_refused(tmp_path: Path, finished: Path) -> None:
    run(begun(tmp_path / "out"), ALL[:2])
    with pytest.raises(ValueError, match=r"has no predictions of clean, gaussian_noise-1: evaluate with --predictions"):
        rescore(CPU, Results.open(tmp_path / "out"))
    for place in (tmp_path, finished / "settings.json"):
        with pytest.raises(ValueError, match=r"holds no evaluation: there is no .*settings\.json"):
            Results.open(place)
    other = begun(tmp_path / "other", seed=5)
    (tmp_path / "other" / "predictions").symlink_to(finished / "predictions")
    with pytest.raises(ValueError, match=r"clean\.parquet is of another evaluation"):
        rescore(CPU, other)


def test_predictions_of_another_number_of_samples_or_classes_are_named(tmp_path: Path) -> None:
    results = begun(tmp_path)
    run(results, ALL[:1], predictions=True)
    path = results.predictions(None)
    (whole,) = read_predictions(path)
    write_predictions(path, [Predictions(*(part[:119] for part in whole))], results.evaluation, "clean")
    with pytest.raises(ValueError, match=r"clean\.parquet is damaged: it has 119 rows of 120$"):
        rescore(CPU, results)
    write_predictions(path, [whole._replace(logits=whole.logits[:, :2])], results.evaluation, "clean")
    with pytest.raises(ValueError, match=r"clean\.parquet: labels must lie in \[0, 2\), got 2"):
        rescore(CPU, results)


def test_a_cell_without_predictions_is_done_again_where_they_are_wanted(tmp_path: Path) -> None:
    run(begun(tmp_path), ALL[:3])
    opened: list[Cell] = []
    run(begun(tmp_path), ALL[:3], opened, predictions=True)
    assert opened[1:] == list(ALL[:3])
    assert sorted(os.listdir(tmp_path / "predictions"))[0] == "clean.parquet"


def test_a_cell_whose_predictions_are_damaged_or_of_another_is_done_again(tmp_path: Path) -> None:
    results = begun(tmp_path)
    run(results, ALL[:4], predictions=True)
    clean, first, second, third = map(results.predictions, ALL[:4])
    whole = third.read_bytes()
    clean.write_bytes(clean.read_bytes()[:-30])
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=r"clean\.parquet is damaged"):
        rescore(CPU, results)
    opened: list[Cell] = []
    run(begun(tmp_path), ALL[:4], opened, predictions=True)
    assert opened[1:] == [ALL[0], ALL[2]] and third.read_bytes() == whole
    rescore(CPU, results)
    second.write_bytes(first.read_bytes())
    has = r"noise-2\.parquet has the predictions of gaussian_noise-1, not of gaussian_noise-2$"
    with pytest.raises(ValueError, match=has):
        rescore(CPU, results)


def test_reading_many_predictions_is_said_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(begun(tmp_path), ALL[:2], predictions=True)
    size = sum(path.stat().st_size for path in (tmp_path / "predictions").iterdir())
    for limit, said in ((size, 0), (size - 1, 1)):
        monkeypatch.setattr("fastmoll.robustness.measure._MUCH", limit)
        capsys.readouterr()
        run(begun(tmp_path), ALL[:3], predictions=True)
        assert capsys.readouterr().out.count("reading 0.0 GB of predictions, to see whether they are whole\n") == said
        (tmp_path / "predictions" / "gaussian_noise-2.parquet").unlink()


def test_a_network_that_gives_no_numbers_leaves_no_figures(tmp_path: Path) -> None:
    results = begun(tmp_path)
    model = network()
    with torch.no_grad():
        model.get_parameter("1.bias")[0] = torch.nan
    with pytest.raises(Stop, match="the NLL on clean is nan") as stopped:
        measure(CPU, model, results, ALL, Loader, num_classes=3)
    assert stopped.value.code == 1 and os.listdir(tmp_path / "cells") == []


def test_each_line_on_the_way_says_what_its_images_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(begun(tmp_path), ALL[:2])
    heads = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "error" in line]
    assert heads == ["clean", "gaussian_noise-1, official"]


def test_a_loader_that_loses_a_sample_is_noticed(tmp_path: Path) -> None:
    class Short(Loader):
        num_samples = 121

    with pytest.raises(RuntimeError, match="evaluated 120 images of 121"):
        measure(CPU, network(), begun(tmp_path), ALL, Short, num_classes=3)
