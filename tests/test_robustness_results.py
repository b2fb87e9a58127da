"""Tests of fastmoll.robustness.results and fastmoll.robustness.measure."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastmoll.distributed import Process, Stop
from fastmoll.kernels.corruption_constants import CORRUPTIONS
from fastmoll.metrics import ALEXNET, mean_corruption_error
from fastmoll.report.read import read_run
from fastmoll.robustness.measure import measure, rescore
from fastmoll.robustness.predictions import Predictions, read_predictions, write_predictions
from fastmoll.robustness.results import (
    ALL,
    Cell,
    Results,
    add_to_result,
    cell_name,
    has_baseline,
    table,
)
from fastmoll.scoring import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = Process(0, 1, torch.device("cpu"))
HEADER: dict[str, Any] = {
    "source": "official",
    "frost": None,
    "data": "noise",
    "size": 2,
    "num_classes": 3,
    "net": "linear",
    "augment": None,
    "mollify": None,
    "seed": None,
    "settings": {},
    "checkpoint": "w.pt",
    "count": 120,
    "baseline": False,
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))


class Loader:
    """Random images, other ones for each cell."""

    num_samples = 120

    def __init__(self, cell: Cell) -> None:
        generator = torch.Generator().manual_seed(ALL.index(cell))
        self.images = torch.randn(120, 3, 2, 2, generator=generator)
        self.labels = torch.randint(3, (120,), generator=generator)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for rows in torch.arange(120).split(50):
            yield self.images[rows], self.labels[rows], rows


def begun(out: Path, images: dict[str, str] | None = None, of_files: bool = False, **fingerprint: Any) -> Results:
    out.mkdir(exist_ok=True)
    results = Results(out, HEADER, {"checkpoint": "abc", **fingerprint}, {"device": "cpu"}, images, of_files=of_files)
    results.begin()
    return results


def run(results: Results, cells: tuple[Cell, ...] = ALL, opened: list[Cell] | None = None, **options: Any) -> None:
    def open_loader(cell: Cell) -> Loader:
        if opened is not None:
            opened.append(cell)
        return Loader(cell)

    measure(CPU, network(), results, cells, open_loader, num_classes=3, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    results = begun(out)
    run(results, predictions=True)
    assert results.finish() is not None
    return out


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
    opened: list[Cell] = []
    results = begun(tmp_path / "out")
    run(results, opened=opened)
    assert opened == [None, *ALL]  # the first also to know how long it is
    assert results.finish() == json.loads((finished / "robustness.json").read_text())
    opened.clear()
    run(results, opened=opened)
    assert opened == []


def test_a_folder_of_another_evaluation_is_refused_by_what_differs(tmp_path: Path) -> None:
    run(begun(tmp_path, seed=1), ALL[:2])
    with pytest.raises(
        ValueError, match=r"with another seed: it was 1 and is now 2; choose another folder with --out DIR$"
    ):
        begun(tmp_path, seed=2)
    with pytest.raises(ValueError, match=r"with another precision: it was None and is now bf16"):
        begun(tmp_path, seed=1, precision="bf16")
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"clean\.json is of another evaluation"):
        begun(tmp_path, seed=2).read(None)
    empty: dict[str, Any] = {name: {} for name in ("header", "fingerprint", "environment", "images")}
    short = {name: value for name, value in HEADER.items() if name != "frost"}
    for damaged, reason in (
        ({}, "it has no header"),
        ([], "it has no header"),
        (empty, "its header has no source"),
        ({**empty, "header": short}, "its header has no frost"),
        ({**empty, "header": HEADER, "fingerprint": 3}, "it has no fingerprint"),
        ({**empty, "header": HEADER, "images": [1]}, "it has no images"),
    ):
        (tmp_path / "settings.json").write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=rf"settings\.json is damaged: {reason}$"):
            begun(tmp_path, seed=1)


def test_settings_of_a_folder_where_nothing_was_evaluated_can_still_be_put_right(tmp_path: Path) -> None:
    begun(tmp_path, seed=1)
    results = begun(tmp_path, seed=2)
    run(results, ALL[:1])
    assert begun(tmp_path, seed=2).read(ALL[0]) is not None


def test_a_corruption_whose_images_were_replaced_is_refused_by_name_and_a_new_one_is_not(tmp_path: Path) -> None:
    run(begun(tmp_path, {"fog-1": "a"}), ALL[:1])
    begun(tmp_path, {"frost-1": "b", "frost-2": "c"})
    begun(tmp_path, {"fog-1": "a", "frost-2": "c"})
    with pytest.raises(ValueError, match=r"frost-2 \(digest of its images\): it was c and is now d; .* \(cp -a\)"):
        begun(tmp_path, {"fog-1": "a", "frost-1": "b", "frost-2": "d"}, of_files=True)
    # Arrays are told apart by their content alone.
    with pytest.raises(ValueError, match=r"frost-2 \(digest of its images\): .* choose another folder with --out DIR$"):
        begun(tmp_path, {"frost-2": "d"})


def test_the_environment_is_the_one_the_cells_were_measured_in(tmp_path: Path, finished: Path) -> None:
    for name in ("predictions", "cells"):
        (tmp_path / name).symlink_to(finished / name)
    shutil.copy(finished / "settings.json", tmp_path)
    elsewhere = Results(tmp_path, HEADER, {"checkpoint": "abc"}, {"device": "another"})
    elsewhere.begin()
    for results in (elsewhere, Results.open(tmp_path)):
        content = results.finish()
        assert content is not None and content["environment"] == {"device": "cpu", "precision": "off"}


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
    with pytest.raises(ValueError, match=r"clean\.parquet: evaluated 119 images of 120"):
        rescore(CPU, results)
    write_predictions(path, [whole._replace(logits=whole.logits[:, :2])], results.evaluation, "clean")
    with pytest.raises(ValueError, match=r"clean\.parquet: labels must be in 0\.\.1, got 2"):
        rescore(CPU, results)


def test_the_file_of_a_cell_says_which_it_is_and_what_its_images_are(tmp_path: Path) -> None:
    made = {**HEADER, "source": "generated", "frost": "made"}
    results = Results(tmp_path, made, {"checkpoint": "abc"}, {})
    results.begin()
    run(results, (None, ("fog", 3)))
    clean, fog = (json.loads((tmp_path / "cells" / f"{name}.json").read_text()) for name in ("clean", "fog-3"))
    assert [clean[x] for x in ("corruption", "severity", "images")] == [None, None, "clean"]
    assert [fog[x] for x in ("corruption", "severity", "images")] == ["fog", 3, "generated (frost: made)"]


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


def test_a_network_that_gives_no_numbers_leaves_no_figures(tmp_path: Path) -> None:
    results = begun(tmp_path)
    model = network()
    with torch.no_grad():
        model.get_parameter("1.bias")[0] = torch.nan
    with pytest.raises(Stop, match="the NLL on clean is nan") as stopped:
        measure(CPU, model, results, ALL, Loader, num_classes=3)
    assert stopped.value.code == 1 and os.listdir(tmp_path / "cells") == []


def test_a_loader_that_loses_a_sample_is_noticed(tmp_path: Path) -> None:
    class Short(Loader):
        num_samples = 121

    with pytest.raises(RuntimeError, match="evaluated 120 images of 121"):
        measure(CPU, network(), begun(tmp_path), ALL, Short, num_classes=3)


def test_mce_is_the_mean_of_errors_relative_to_alexnets() -> None:
    own = {name: [{"error": error}] * 5 for name, error in ALEXNET.items()}
    assert mean_corruption_error(own) == {"value": pytest.approx(100, abs=1e-12), "baseline": "AlexNet"}
    half = {name: [{"error": error + shift} for shift in (-2, -1, 0, 1, 2)] for name, error in ALEXNET.items()}
    half["fog"] = [{"error": ALEXNET["fog"] / 2}] * 5
    assert mean_corruption_error(half)["value"] == pytest.approx(100 * 14.5 / 15, abs=1e-9)
    assert {*ALEXNET} == {*CORRUPTIONS}


def test_alexnets_errors_are_the_published_ones() -> None:
    # As ImageNet-C's paper prints them, in the order noise, blur, weather, digital.
    printed = [88.6, 89.4, 92.3, 82.0, 82.6, 78.6, 79.8, 86.7, 82.7, 81.9, 56.5, 85.3, 64.6, 71.8, 60.7]
    for name, value in zip(CORRUPTIONS, printed, strict=True):
        assert ALEXNET[name] == pytest.approx(value, abs=0.0501), name
    half = {name: [{"error": 50.0}] * 5 for name in CORRUPTIONS}
    assert mean_corruption_error(half)["value"] == pytest.approx(64.67, abs=0.02)  # the mean of 50 / printed


def test_alexnet_is_the_baseline_of_imagenet_alone() -> None:
    classes = [f"n{number:08}" for number in range(1000)]
    assert has_baseline(classes, 224)
    assert not has_baseline(classes, 64) and not has_baseline(classes[:999], 224)
    assert not has_baseline([str(number) for number in range(1000)], 224)


def test_the_table_shows_every_severity_and_what_the_images_are(finished: Path, tmp_path: Path) -> None:
    text = table(Results.open(finished))
    content = json.loads((finished / "robustness.json").read_text())
    (row,) = [line.split() for line in text.splitlines() if line.startswith("fog")]
    cells = content["cells"]["fog"]
    assert row[1:6] == [f"{cell['error']:.2f}" for cell in cells]
    assert row[6] == f"{sum(cell['error'] for cell in cells) / 5:.2f}"
    (mean,) = [line.split() for line in text.splitlines() if line.startswith("corrupted")]
    means = content["corrupted"]
    assert mean[1:] == [f"{means['error']:.2f}", *(f"{means[x]:.4f}" for x in ("nll", "ece", "ece_batch100"))]
    assert "corrupted images official" in text and "mCE" not in text
    some = begun(tmp_path)
    run(some, (None, ("fog", 2)))
    assert "1 of 75 cells" in table(some) and "–" in table(some)


def test_the_table_says_where_frost_is_from_where_it_has_frost_alone(tmp_path: Path) -> None:
    made = Results(tmp_path, {**HEADER, "source": "generated", "frost": "made"}, {}, {})
    made.begin()
    run(made, (None, ("fog", 2)))
    assert table(made).splitlines()[0].endswith("corrupted images generated")
    run(made, (None, ("fog", 2), ("frost", 4)))
    assert table(made).splitlines()[0].endswith("corrupted images generated (frost: made)")


def test_a_trainers_result_gets_the_corrupted_error_as_a_fraction(tmp_path: Path, finished: Path) -> None:
    content = json.loads((finished / "robustness.json").read_text())
    path = tmp_path / "result.json"
    assert add_to_result(tmp_path, content) is None and not path.exists()
    result = {"validation": {"error": 0.5, "count": 120.0}, "steps": 3}
    path.write_text(json.dumps(result))
    assert add_to_result(tmp_path, content) is None
    added = {"error": content["corrupted"]["error"] / 100, "source": "official"}
    assert json.loads(path.read_text()) == {**result, "corrupted": added}
    # Those of generated images don't replace it, nor do those of other data.
    refused = f"the corrupted error was not added to {path}"
    reason = add_to_result(tmp_path, {**content, "source": "generated"})
    assert reason == f"{refused}, which has that of official images: one of generated images does not replace it"
    reason = add_to_result(tmp_path, {**content, "count": 7})
    assert reason == f"{refused}: the run was validated on 120.0 images, not on 7"
    assert json.loads(path.read_text())["corrupted"] == added
    path.write_text(json.dumps(result))
    assert add_to_result(tmp_path, {**content, "source": "generated", "frost": "made"}) is None
    assert json.loads(path.read_text())["corrupted"]["source"] == "generated (frost: made)"
    assert add_to_result(tmp_path, content) is None and json.loads(path.read_text())["corrupted"] == added


def test_a_trainers_result_that_can_not_be_written_is_named_unless_its_folder_may_only_be_read(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads((finished / "robustness.json").read_text())
    path = tmp_path / "result.json"
    path.write_text('{"validation": {"count": 120}}')

    def fail(path: Path, content: object) -> None:
        raise OSError(f"{path} can't be written: No space left on device")

    monkeypatch.setattr("fastmoll.robustness.results.write_json", fail)
    reason = add_to_result(tmp_path, content)
    assert reason == f"the corrupted error was not added: {path} can't be written: No space left on device"
    path.unlink()
    path.mkdir()
    reason = add_to_result(tmp_path, content)
    assert reason == f"the corrupted error was not added to {path}, which can't be read: Is a directory"
    monkeypatch.setattr(os, "access", lambda place, mode: (place, mode) != (tmp_path, os.W_OK))
    assert add_to_result(tmp_path, content) is None


@pytest.mark.parametrize("damaged", ["{", "[]", '{"validation": null}', '{"validation": [1]}'])
def test_a_damaged_result_of_the_trainer_is_named_and_left_alone(tmp_path: Path, finished: Path, damaged: str) -> None:
    content = json.loads((finished / "robustness.json").read_text())
    path = tmp_path / "result.json"
    path.write_text(damaged)
    with pytest.raises(ValueError, match=r"result\.json is damaged, and did not get the corrupted error"):
        add_to_result(tmp_path, content)
    assert path.read_text() == damaged


def test_the_names_of_cells_are_those_of_their_files() -> None:
    assert [cell_name(cell) for cell in ALL[:3]] == ["clean", "gaussian_noise-1", "gaussian_noise-2"]
    assert len({cell_name(cell) for cell in ALL}) == 76


def test_mce_is_in_the_results_where_alexnet_is_the_baseline(tmp_path: Path, finished: Path) -> None:
    (tmp_path / "cells").symlink_to(finished / "cells")
    results = Results(tmp_path, {**HEADER, "baseline": True}, {"checkpoint": "abc"}, {})
    content = results.finish()
    assert content is not None and "baseline" not in content
    assert content["mce"] == mean_corruption_error(content["cells"])
    assert read_run(tmp_path).mce == content["mce"]
    assert f"mCE {content['mce']['value']:.2f} % (relative to AlexNet), official" in table(results)
    made = {**HEADER, "baseline": True, "source": "generated", "frost": "made"}
    results = Results(tmp_path, made, {"checkpoint": "abc"}, {})
    content = results.finish()
    assert content is not None and content["mce"] is None and "mCE" not in table(results)
