"""Figures of a report: what they draw of the runs, against the results themselves."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from fake_runs import NAMES, fake_result, fake_runs, write_run
from PIL import Image

from fastmoll.report import figures as report_figures
from fastmoll.report import figures_runs as of_runs
from fastmoll.report.figures import all_figures
from fastmoll.report.figures_ablations import ablations, find_sweeps
from fastmoll.report.read import read_run
from fastmoll.report.runs import Group, group_seeds
from fastmoll.report.style import NothingToShowError, plain, style

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few pictures."""
    root = tmp_path_factory.mktemp("pictures")
    blocks = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    for number, block in enumerate(blocks):
        Image.fromarray(block.repeat(8, 0).repeat(8, 1)).save(root / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of two augmentations with and without mollification, two seeds each."""
    return fake_runs(tmp_path_factory.mktemp("runs"))


def groups_of(paths: Sequence[Path]) -> list[Group]:
    return group_seeds([read_run(path) for path in paths])


def lines_of(paths: Sequence[Path]) -> list[of_runs.Line]:
    groups = groups_of(paths)
    return of_runs.make_lines(groups, groups)


def contents(paths: Sequence[Path], **wanted: Any) -> list[dict[str, Any]]:
    """The results themselves, read without the code under test."""
    found = [json.loads(next(path.glob("*/robustness.json")).read_text()) for path in paths]
    return [one for one in found if all(one[key] == value for key, value in wanted.items())]


def drawn(axes: Any, label: str) -> np.ndarray:
    """The points of the line of that label, ``(N, 2)``."""
    every = [*axes.lines, *(x for container in axes.containers for x in container if x is not None)]
    handles, labels = axes.get_legend_handles_labels()
    handle = handles[labels.index(label)]
    line = handle[0] if isinstance(handle, tuple) else handle
    assert line in every
    return np.asarray(line.get_xydata(), np.float64)


def small_error(result: dict[str, Any], *path: Any) -> float:
    value: Any = result
    for key in path:
        value = value[key]
    return float(value["error"])


# --- figures of runs --------------------------------------------------------------------------------------------------


def test_error_against_severity_is_the_mean_over_corruptions_and_seeds(results: list[Path]) -> None:
    with style():
        canvas, _ = of_runs.error_severity(lines_of(results))
    runs = contents(results, augment="fcr", mollify=True)
    assert len(runs) == 2
    for axes, metric in zip(canvas.axes, ("error", "nll", "ece"), strict=False):
        points = drawn(axes, "fcr + mollification")
        expected = [np.mean([run["clean"][metric] for run in runs])]
        expected += [np.mean([run["cells"][name][s][metric] for run in runs for name in NAMES]) for s in range(5)]
        np.testing.assert_allclose(points, np.stack([range(6), expected], 1))
        # The bands of a pair, which have one colour, have edges like their lines.
        edges = [(tuple(x.get_edgecolor()[0]), x.get_linestyle()[0][1] is None) for x in axes.collections]
        assert len(edges) == len({*edges}) == 4 and all(colour[3] > 0.5 for colour, _ in edges)


def test_clean_and_corrupted_errors_are_those_of_the_results(results: list[Path]) -> None:
    with style():
        canvas, caption = of_runs.clean_corrupted(lines_of(results))
    runs = contents(results, augment="fcr+trivial", mollify=False)
    expected = [np.mean([run[part]["error"] for run in runs]) for part in ("clean", "corrupted")]
    np.testing.assert_allclose(drawn(canvas.axes[0], "fcr+trivial"), [expected])
    assert "Arrows" in caption
    assert [text.get_zorder() for text in canvas.axes[0].texts] == [1.5, 1.5]  # below the markers


def test_an_arrow_too_short_for_its_markers_lies_on_them(tmp_path: Path) -> None:
    values = [{**fake_result(mollify=False, count=40), "net": net, "mollify": x} for x in (False, True) for net in "ab"]
    for value in values:
        value["clean"] = {**value["clean"], "error": float(value["net"] == "b") * 20 + value["mollify"]}
    lines = lines_of([write_run(tmp_path / str(number), value) for number, value in enumerate(values)])
    with style():
        canvas, _ = of_runs.clean_corrupted(lines)
    arrows = canvas.axes[0].texts
    assert len(arrows) == 2
    for arrow in arrows:
        assert arrow.get_zorder() > max(line.get_zorder() for line in canvas.axes[0].lines)
        assert arrow.arrow_patch.get_path_effects()  # seen on a marker of its colour


def test_polygons_and_radar_show_each_corruption(results: list[Path]) -> None:
    lines = lines_of(results)
    with style():
        around, _ = of_runs.radar(lines)
        cells, _ = of_runs.polygons(lines)
    without, mollified = (contents(results, augment="fcr", mollify=x) for x in (False, True))
    means = [np.mean([small_error(run, "cells", name, s) for run in mollified for s in range(5)]) for name in NAMES]
    points = drawn(around.axes[0], "fcr + mollification")
    np.testing.assert_allclose(points[:-1, 1], means)
    np.testing.assert_array_equal(points[0], points[-1])  # closed
    numbers = around.axes[0].texts
    assert [x.get_text() for x in numbers] == [f"{x:g} %" for x in around.axes[0].get_yticks()]
    assert min(x.get_zorder() for x in numbers) > max(x.get_zorder() for x in around.axes[0].lines)
    # The first panel's marks: group by group, severity by severity.
    marks = np.concatenate([np.asarray(x.get_offsets()) for x in cells.axes[0].collections])

    def mean(runs: list[dict[str, Any]], name: str, s: int) -> float:
        return round(float(np.mean([small_error(run, "cells", name, s) for run in runs])), 6)

    expected = {(mean(without, name, s), mean(mollified, name, s)) for name in NAMES for s in range(5)}
    assert {tuple(np.round(mark, 6)) for mark in marks} == expected
    sides = [len(x.get_paths()[0].vertices) - 1 for x in cells.axes[0].collections]
    assert sorted({*sides}) == [3, 4, 5, 6, 7]


def test_the_numbers_of_a_radar_stand_where_no_curve_is() -> None:
    curve = np.full(16, 10.0)
    curve[[5, 6]] = 15  # between these, where all others run through the number
    assert of_runs._free_angle([curve], [10.0], 1.0) == pytest.approx(2 * np.pi * 5.5 / 15)


def test_differences_are_with_less_without(results: list[Path]) -> None:
    with style():
        canvas, _ = of_runs.differences(lines_of(results))
    points = drawn(canvas.axes[0], "fcr + mollification")
    without, mollified = (contents(results, augment="fcr", mollify=x) for x in (False, True))
    rows = [("clean",), *(("cells", name) for name in NAMES)]
    for row, change in zip(rows, points[:, 0], strict=False):

        def mean(runs: list[dict[str, Any]], row: tuple[str, ...] = row) -> float:
            paths = [row] if row == ("clean",) else [(*row, s) for s in range(5)]
            return float(np.mean([small_error(run, *path) for run in runs for path in paths]))

        assert change == pytest.approx(mean(mollified) - mean(without))
    assert points[-1, 0] == pytest.approx(
        np.mean([run["corrupted"]["error"] for run in mollified])
        - np.mean([run["corrupted"]["error"] for run in without])
    )
    assert [text.get_text() for text in canvas.axes[0].get_yticklabels()][:2] == ["clean", "gaussian noise"]


def test_an_unknown_deviation_has_no_bar(tmp_path: Path) -> None:
    # Two seeds without and one with mollification; then two on both sides.
    values: list[dict[str, Any]] = [{"mollify": x, "seed": y} for x, y in ((False, 0), (False, 1), (True, 0))]
    paths = [write_run(tmp_path / str(n), fake_result(count=40, **x)) for n, x in enumerate(values)]
    both = [*paths, write_run(tmp_path / "more", fake_result(count=40, mollify=True, seed=1))]
    for runs, known in ((paths, False), (both, True)):
        with style():
            canvas, caption = of_runs.differences(lines_of(runs))
        assert [x.has_xerr for x in canvas.axes[0].containers] == [known]
        assert ("standard deviation" in caption) == known
    swept = [*both, write_run(tmp_path / "swept", fake_result(count=40, settings={"mollify.beta": [1, 3]}))]
    with style():
        canvas, caption = ablations(lines_of(swept))
    bars = [np.asarray(x) for x in canvas.axes[0].containers[0][2][0].get_segments()]
    lengths = [float(np.ptp(x[:, 1])) if len(x) else math.nan for x in bars]
    assert lengths[0] > 0 and math.isnan(lengths[1]) and "standard deviation" in caption


def test_captions_name_what_all_runs_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "run", fake_result(count=40, settings={"optim.epochs": 4}))
    only = {"error_severity": report_figures._OF_RUNS["error_severity"]}
    monkeypatch.setattr(report_figures, "_OF_RUNS", only)
    figure = all_figures(groups_of([path]), tmp_path / "out")[0]
    assert figure.caption.endswith(" All runs: optim.epochs=4.")


def test_reliability_sums_the_bins_of_all_seeds_and_cells(results: list[Path]) -> None:
    with style():
        canvas, _ = of_runs.reliability(lines_of(results))
    runs = contents(results, augment="fcr", mollify=False)
    for axes, cells in zip(
        canvas.axes,
        ([run["clean"] for run in runs], [cell for run in runs for row in run["cells"].values() for cell in row]),
        strict=True,
    ):
        bins = np.sum([cell["reliability"] for cell in cells], 0)
        bins = bins[bins[:, 0] >= 10]
        np.testing.assert_allclose(drawn(axes, "fcr"), bins[:, 1:] / bins[:, :1])


def test_sweeps_are_found_with_the_recipe_among_them_and_joint_ones_stay_one(tmp_path: Path) -> None:
    swept: list[dict[str, Any]] = [
        {},
        {"mollify.beta": [1, 10]},
        {"mollify.beta": [1, 3]},
        {"mollify.k_noise": 2.0, "mollify.k_blur": 2.0},
        {"mollify.k_noise": 0.5, "mollify.k_blur": 0.5},
    ]
    paths = [write_run(tmp_path / str(i), fake_result(settings=settings)) for i, settings in enumerate(swept)]
    paths.append(write_run(tmp_path / "other", fake_result(net="wrn40", settings={"optim.epochs": 3})))
    lines = lines_of(paths)
    found = {names: [dict(x.group.run.settings) for x in members] for names, members in find_sweeps(lines)}
    assert found == {
        ("mollify.beta",): [{}, {"mollify.beta": [1, 3]}, {"mollify.beta": [1, 10]}],
        ("mollify.k_blur", "mollify.k_noise"): [swept[4], {}, swept[3]],
    }
    with style():
        canvas, _ = ablations(lines)
    ticks = [[text.get_text() for text in axes.get_xticklabels()] for axes in canvas.axes]
    assert ticks == [["(1, 2)\n(recipe)", "(1, 3)", "(1, 10)"], ["0.5, 0.5", "1, 1\n(recipe)", "2, 2"]]
    errors = [contents(paths, settings=x)[0]["corrupted"]["error"] for x in ({}, swept[2], swept[1])]
    np.testing.assert_allclose(drawn(canvas.axes[0], "corrupted")[:, 1], errors)


def test_roles_are_not_joined_by_a_line(tmp_path: Path) -> None:
    swept: list[dict[str, Any]] = [{"mollify.roles": [1, *roles]} for roles in ((1, 0), (0, 1))]
    paths = [write_run(tmp_path / str(i), fake_result(count=40, settings=x)) for i, x in enumerate(swept)]
    with style():
        canvas, _ = ablations(lines_of(paths))
    (axes,) = canvas.axes
    assert {line.get_linestyle() for line in axes.lines} == {"None"}
    assert axes.get_xlabel() == "roles (clean, noise, blur)"


def test_odd_names_are_drawn_and_settings_that_cannot_be_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {name: report_figures._OF_RUNS[name] for name in ("error_severity", "ablations")}
    monkeypatch.setattr(report_figures, "_OF_RUNS", shown)
    names = ("a$x_{$", r"\$5\frac$", "🦊猫", "犬", "L" * 300, "<b>&amp;", "../../x")
    betas = [1, 1], ["a", 2], [1e308, -1], [True, 1]
    paths = [
        write_run(
            tmp_path / f"{i}{j}",
            fake_result(count=40, data=name, net=name, augment=name, settings={"mollify.beta": beta, name: "$"}),
        )
        for i, name in enumerate(names)
        for j, beta in enumerate(betas)
    ]
    figures = [x for x in all_figures(groups_of(paths), tmp_path / "out") if x.png is not None]
    drawn = [x.png for x in figures if x.png and x.name.startswith(("error_severity", "ablations"))]
    assert len({*drawn}) == len(drawn) == 2 * len(names)
    assert {x.parent for x in drawn} == {tmp_path / "out"} and max(len(x.name) for x in drawn) < 255


def test_text_of_users_is_no_mathematics_and_signs_without_a_picture_have_numbers() -> None:
    assert plain("a$b$") == r"a\$b\$"
    assert plain("猫") != plain("犬") and plain("猫").strip() == "U+732B"
    assert plain("é–γ") == "é–γ"
    assert len(plain("a" * 300 + "z")) == 60 and plain("a" * 300 + "z").endswith("z")


def test_polygons_have_one_scale_and_grow_with_severity(results: list[Path]) -> None:
    with style():
        canvas, _ = of_runs.polygons(lines_of(results))
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in canvas.axes}) == 1
    assert canvas.axes[0].get_xlim() == canvas.axes[0].get_ylim()
    sizes = {len(x.get_paths()[0].vertices) - 1: float(x.get_sizes()[0]) for x in canvas.axes[0].collections}
    assert [sizes[n] for n in range(3, 8)] == sorted(sizes.values())
    (legend,) = canvas.legends
    assert [x.get_text() for x in legend.get_texts()] == [
        *("noise", "blur", "weather", "digital"),
        *("severity 1", "2", "3", "4", "5"),
    ]


def test_a_run_looks_the_same_in_every_figure_and_as_its_partner(results: list[Path]) -> None:
    groups = groups_of(results)
    looks = {line.group.run.path: line.look for line in of_runs.make_lines(groups, groups)}
    for part in ([groups[3]], groups[2:], groups[::-1]):
        for line in of_runs.make_lines(part, groups):
            look = looks[line.group.run.path]
            assert (line.look.colour, line.look.marker) == (look.colour, look.marker)
    by_augment: dict[Any, set[str]] = {}
    for group in groups:
        by_augment.setdefault(group.run.augment, set()).add(looks[group.run.path].colour)
        assert looks[group.run.path].mollified == group.run.mollify
    assert [len(colours) for colours in by_augment.values()] == [1, 1]
    assert len(set.union(*by_augment.values())) == 2


# --- all of them ------------------------------------------------------------------------------------------------------


def test_every_figure_is_written_in_both_formats_with_its_source_and_nothing_outside(
    results: list[Path], folder: Path, tmp_path: Path
) -> None:
    official = fake_runs(tmp_path / "runs", source="official", augments=("fcr",), seeds=(0,))
    figures = all_figures(groups_of([*results, *official]), tmp_path / "out", images=folder)
    written = [figure for figure in figures if figure.png is not None]
    assert {figure.name.split("-")[0] for figure in figures} - {figure.name.split("-")[0] for figure in written} == {
        "ablations"
    }
    for figure in written:
        assert figure.png is not None
        assert figure.svg is not None
        with Image.open(figure.png) as picture:
            assert picture.width == 1152
            low, high = np.asarray(picture.convert("L")).min(), np.asarray(picture.convert("L")).max()
            assert low < 100 < 250 < high
            pixels = np.asarray(picture.convert("L"))
        edges = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert edges.min() > 200, f"{figure.name} is cut off"
        tree = ElementTree.parse(figure.svg)
        links = [value for node in tree.iter() for key, value in node.attrib.items() if key.endswith("href")]
        assert all(link.startswith(("#", "data:")) for link in links)
        assert figure.svg.stat().st_size < 1_000_000
        assert figure.caption.endswith(".")
    assert len({figure.name for figure in figures}) == len(figures)
    of_results = [figure for figure in figures if "cifar10" in figure.title]
    for source in ("generated (frost: made)", "official"):
        assert sum(f", {source} corruptions" in figure.title for figure in of_results) == 7
    assert len(of_results) == 14


def test_figures_without_data_are_left_out_with_the_reason(tmp_path: Path) -> None:
    result = fake_result(augment=None, mollify=None, seed=None, net="torchvision:resnet50")
    foreign = write_run(tmp_path / "run", result)
    figures = {figure.name.split("-")[0]: figure for figure in all_figures(groups_of([foreign]), tmp_path / "out")}
    reasons = {name: figure.caption for name, figure in figures.items() if figure.png is None}
    assert reasons == {
        "clean_corrupted": "there is nothing to compare the only run with",
        "differences": "no two runs differ in mollification alone",
        "polygons": "no two runs differ in mollification alone",
        "ablations": "no two runs differ in other settings alone",
        **dict.fromkeys(
            ("information_blur", "corruptions", "spectral_maps", "spectral_profiles"),
            "it needs pictures, and none were given (--images)",
        ),
    }
    assert {file.stem.split("-")[0] for file in (tmp_path / "out").iterdir()} == figures.keys() - reasons.keys()


def test_many_runs_are_split_by_network_and_what_is_left_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for number in range(20):
        result = fake_result(net="presnet50" if number < 18 else "wrn40", settings={"optim.epochs": number})
        paths.append(write_run(tmp_path / str(number), result))
    only = {"error_severity": report_figures._OF_RUNS["error_severity"]}
    monkeypatch.setattr(report_figures, "_OF_RUNS", only)
    figures = all_figures(groups_of(paths), tmp_path / "out")
    severity = {figure.name: figure.caption for figure in figures if figure.name.startswith("error_severity")}
    assert [name.rsplit("-", 1)[1] for name in severity] == ["presnet50", "wrn40"]
    assert ["2 more runs are left out" in caption for caption in severity.values()] == [True, False]


def test_networks_of_few_runs_share_a_figure_where_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [{"net": f"net{number:02}", "mollify": x} for number in range(10) for x in (False, True)]
    paths = [write_run(tmp_path / str(n), fake_result(count=40, **x)) for n, x in enumerate(values)]
    drawn: list[list[str]] = []

    def draw(lines: Sequence[of_runs.Line]) -> Any:
        drawn.append([line.group.run.net for line in lines])
        raise NothingToShowError("nothing")

    monkeypatch.setattr(report_figures, "_OF_RUNS", {"error_severity": ("Error", draw)})
    figures = all_figures(groups_of(paths), tmp_path / "out")
    nets = [f"net{number:02}" for number in range(10) for _ in range(2)]
    assert drawn == [nets[:8], nets[8:16], nets[16:]]
    of_one = [figure for figure in figures if figure.name.startswith("error_severity")]
    assert of_one[0].title == "Error: cifar10, 4 networks, net00 to net03, generated (frost: made) corruptions"
    assert len({figure.name for figure in of_one}) == 3


def test_importing_the_figures_loads_no_matplotlib() -> None:
    code = "import sys, fastmoll.report.figures; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
