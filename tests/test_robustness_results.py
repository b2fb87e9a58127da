"""The folder of an evaluation, and what is made of its cells."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cells_of_noise import HEADER, begun, run, write_finished

from fastmoll.kernels.corruption_constants import CORRUPTIONS
from fastmoll.metrics import ALEXNET, mean_corruption_error
from fastmoll.report.read import read_run
from fastmoll.report.runs import BINARY
from fastmoll.robustness.results import ALL, Results, add_to_result, cell_name, has_baseline, table
from fastmoll.robustness.summary import summary

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_finished(tmp_path_factory.mktemp("finished"))


def test_a_folder_of_another_evaluation_is_refused_by_what_differs(tmp_path: Path) -> None:
    run(begun(tmp_path, seed=1), ALL[:2])
    with pytest.raises(
        ValueError,
        match=r"with another seed: it was 1 and is now 2; choose another folder with --out DIR, or delete this one$",
    ):
        begun(tmp_path, seed=2)
    with pytest.raises(ValueError, match=r"with another image size: it was None and is now 48"):
        begun(tmp_path, **{"data (digest)": "abc", "image size": 48, "seed": 1})
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
    with pytest.raises(
        ValueError,
        match=r"frost-2 \(digest of its images\): .* choose another folder with --out DIR, or delete this one$",
    ):
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


def test_the_file_of_a_cell_says_which_it_is_and_what_its_images_are(tmp_path: Path) -> None:
    made = {**HEADER, "source": "generated", "frost": "made"}
    results = Results(tmp_path, made, {"checkpoint": "abc"}, {})
    results.begin()
    run(results, (None, ("fog", 3)))
    clean, fog = (json.loads((tmp_path / "cells" / f"{name}.json").read_text()) for name in ("clean", "fog-3"))
    assert [clean[x] for x in ("corruption", "severity", "images")] == [None, None, "clean"]
    assert [fog[x] for x in ("corruption", "severity", "images")] == ["fog", 3, "generated (frost: made)"]


def test_mce_is_the_mean_of_errors_relative_to_alexnets() -> None:
    own = {name: [{"error": error}] * 5 for name, error in ALEXNET.items()}
    assert mean_corruption_error(own) == {"value": pytest.approx(100, abs=1e-12), "baseline": "AlexNet"}
    half = {name: [{"error": error + shift} for shift in (-2, -1, 0, 1, 2)] for name, error in ALEXNET.items()}
    half["fog"] = [{"error": ALEXNET["fog"] / 2}] * 5
    assert mean_corruption_error(half)["value"] == pytest.approx(100 * 14.5 / 15, abs=1e-9)
    assert {*ALEXNET} == {*CORRUPTIONS}
    with pytest.raises(ValueError, match=r"cells must have figures of every corruption, got none of fog$"):
        mean_corruption_error({**own, "fog": []})


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


def test_tables_say_of_which_likelihood_nll_and_ece_are_where_it_is_not_that_of_the_training(finished: Path) -> None:
    plain = Results.open(finished)
    binary = Results(finished, {**HEADER, "settings": {"optim.loss": "binary"}}, {"checkpoint": "abc"}, {})
    assert BINARY in table(binary) and BINARY not in table(plain)
    assert BINARY in summary({"a": plain, "b": binary, "c": None}, None)
    assert BINARY not in summary({"a": plain, "c": None}, None)


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


def test_a_trainers_result_keeps_the_error_of_its_official_set(tmp_path: Path, finished: Path) -> None:
    content = json.loads((finished / "robustness.json").read_text())
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"validation": {"count": 120}}))
    for place in ("CIFAR-10-C", "CIFAR-10-C"):
        assert add_to_result(tmp_path, {**content, "set": place}) is None
    before = json.loads(path.read_text())
    assert before["corrupted"]["set"] == "CIFAR-10-C"
    other = {**content, "set": "CIFAR-10-C-bar"}  # by chance with the same error
    reason = add_to_result(tmp_path, other)
    kept = "which has that of the official set CIFAR-10-C: that of CIFAR-10-C-bar does not replace it"
    assert reason is not None and reason.endswith(kept) and json.loads(path.read_text()) == before
    # What an earlier version wrote says no set.
    del before["corrupted"]["set"]
    path.write_text(json.dumps(before))
    assert add_to_result(tmp_path, other) is None


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
    reason = add_to_result(tmp_path, content)
    assert reason is not None
    assert reason.startswith(f"the corrupted error was not added to {path}, which is damaged: ")
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
