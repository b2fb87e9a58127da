"""How figures of a report are written, whatever they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_runs import fake_runs
from PIL import Image

from fastmoll.report import figures_method as method
from fastmoll.report import figures_runs as of_runs
from fastmoll.report.read import read_run
from fastmoll.report.runs import group_seeds
from fastmoll.report.style import style, write

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[of_runs.Line]:
    groups = group_seeds(map(read_run, fake_runs(tmp_path_factory.mktemp("runs"), seeds=(0,), count=40)))
    return of_runs.make_lines(groups, groups)


def test_a_figure_is_laid_out_once_and_alike_in_both_formats(lines: list[of_runs.Line], tmp_path: Path) -> None:
    with style():
        canvas, _ = of_runs.error_severity(lines[:2])
        other, _ = of_runs.error_severity(lines[:2])
        png, svg = write(canvas, tmp_path, "a")
        other.savefig(tmp_path / "b.png", dpi=160, metadata={"Software": None})
    # As savefig writes it, which lays it out and draws it twice.
    with Image.open(png) as one, Image.open(tmp_path / "b.png") as two:
        assert one.size == two.size and one.tobytes() == two.tobytes()
        points = re.findall(r'<svg [^>]*?width="([\d.]+)pt" height="([\d.]+)pt"', svg.read_text())[0]
        assert [float(x) / 72 * 160 for x in points] == pytest.approx(one.size, abs=1)


def test_the_columns_of_a_legend_are_as_long_as_each_other(lines: list[of_runs.Line]) -> None:
    with style():
        canvas, _ = of_runs.error_severity(lines)
    assert canvas.legends[0]._ncols == 2  # of four names, of which three fit beside each other


def test_the_same_figure_is_the_same_file(lines: list[of_runs.Line], tmp_path: Path) -> None:
    for name, draw in (("severity", lambda: of_runs.error_severity(lines)), ("labels", method.dirichlet_triangles)):
        with style():
            first, second = (write(draw()[0], tmp_path, f"{name}{number}") for number in range(2))
        assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_drawing_leaves_the_users_matplotlib_as_it_was(lines: list[of_runs.Line], tmp_path: Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 33.0, "axes.grid": True, "svg.fonttype": "none"}):
        before = dict(mpl.rcParams)
        with style():
            assert mpl.rcParams["font.size"] != 33.0
            of_runs.error_severity(lines[:2])
        assert dict(mpl.rcParams) == before
