"""A report looked at in a real browser: on a phone, on a screen, in print."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, browser, find_browser
from fake_runs import fake_runs

from fastmoll.report.figures import all_figures
from fastmoll.report.page import write_page
from fastmoll.report.pairs import in_order
from fastmoll.report.read import read_run
from fastmoll.report.runs import group_seeds
from fastmoll.report.table import Number, Table
from fastmoll.report.tables import all_tables

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium")

MIXED = Table(
    title="For sorting",
    note="A column of each kind.",
    columns=("name", "error", "signed", "text", "words"),
    rows=(
        ("b10", Number(4.0, 0.1, 1), Number(-1.5, None, 1, signed=True), "12 (generated)", "no"),
        ("a", None, Number(0.5, 0.1, 1, signed=True), "–", None),
        ("b9", Number(12.1, 0.2, 1), Number(-20.0, None, 1, signed=True), "9 (official)", "yes"),
        ("c", Number(8.25, 0.2, 2), None, "1,024", "maybe"),
    ),
)

# Contrast of every text with what is behind it, as the guidelines for accessible web content define it.
CONTRAST = """(() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility()) continue;
    let behind = element, colour;
    do {
      colour = behind ? parse(getComputedStyle(behind).backgroundColor) : [255, 255, 255];
      behind = behind && behind.parentElement;
    } while (colour.length > 3 && colour[3] === 0);
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(colour)].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), element.tagName, element.textContent.trim().slice(0, 40)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
})()"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with all tables and figures of a few runs."""
    folder = tmp_path_factory.mktemp("report")
    runs = fake_runs(folder / "runs", augments=("fcr",), seeds=(0, 1))
    groups = in_order(group_seeds([read_run(run) for run in runs]))
    write_page([MIXED, *all_tables(groups)], all_figures(groups, folder / "figures"), folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def opened(window: Page, report: Path) -> Page:
    """The report, freshly loaded in a window of a desk's width."""
    window.errors.clear()
    window.requests.clear()
    window.view(1280)
    window.open(report)
    return window


def column(page: Page, number: int) -> list[str]:
    cells = f"[...document.querySelector('table').tBodies[0].rows].map(row => row.cells[{number}].textContent.trim())"
    return [text.replace("\N{NO-BREAK SPACE}", " ") for text in page.run(cells)]


def click(page: Page, number: int) -> None:
    page.run(f"document.querySelectorAll('table')[0].querySelectorAll('thead button')[{number}].click()")


def test_every_figure_loads_and_nothing_is_complained_about_or_fetched(opened: Page) -> None:
    sizes = opened.run("[...document.images].map(image => [image.complete, image.naturalWidth, image.naturalHeight])")
    assert len(sizes) == 9
    assert all(complete and width > 300 and height > 50 for complete, width, height in sizes)
    assert opened.errors == []
    assert all(url.startswith(("file:", "data:")) for url in opened.requests)
    assert sum(url.startswith("file:") for url in opened.requests) == 1


def test_the_policy_of_the_page_keeps_everything_else_from_loading(opened: Page) -> None:
    # The check above would pass with no policy; this shows that one is in force, and that complaints are heard.
    opened.run(
        "new Promise(r => { const i = new Image(); i.onerror = r; i.src = 'http://127.0.0.1:9/a.png'; }).then(() => 0)"
    )
    assert any("Content Security Policy" in error for error in opened.errors)


def test_columns_sort_by_number_up_down_and_back_with_missing_ones_last(opened: Page) -> None:
    before = column(opened, 1)
    assert before == ["4.0 ± 0.1", "–", "12.1 ± 0.2", "8.25 ± 0.20"]
    click(opened, 1)
    assert column(opened, 1) == ["4.0 ± 0.1", "8.25 ± 0.20", "12.1 ± 0.2", "–"]
    assert column(opened, 0) == ["b10", "c", "b9", "a"]  # rows stay whole
    click(opened, 1)
    assert column(opened, 1) == ["12.1 ± 0.2", "8.25 ± 0.20", "4.0 ± 0.1", "–"]
    states = "[...document.querySelectorAll('table')[0].querySelectorAll('thead th')].map(x => x.ariaSort)"
    assert opened.run(states) == ["none", "descending", *["none"] * 3]
    click(opened, 1)
    assert column(opened, 1) == before
    click(opened, 2)
    assert column(opened, 2) == ["−20.0", "−1.5", "+0.5 ± 0.1", "–"]
    click(opened, 3)
    assert column(opened, 3) == ["9 (official)", "12 (generated)", "1,024", "–"]
    click(opened, 4)
    assert column(opened, 4) == ["maybe", "no", "yes", "–"]
    click(opened, 0)
    assert column(opened, 0) == ["a", "b9", "b10", "c"]
    assert opened.run(states) == ["ascending", *["none"] * 4]


def test_columns_sort_from_the_keyboard(opened: Page) -> None:
    opened.run("document.querySelector('.table').focus()")
    opened.press("Tab")
    opened.press("Tab")
    assert opened.run("document.activeElement.textContent.trim()") == "error"
    outline = opened.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"  # where the keyboard is can be seen
    opened.press("Enter")
    assert column(opened, 1)[0] == "4.0 ± 0.1"
    assert column(opened, 1)[-1] == "–"


@pytest.mark.parametrize("width", [320, 390, 768, 1280, 1920])
def test_the_page_never_scrolls_sideways_and_wide_tables_scroll_in_their_box(opened: Page, width: int) -> None:
    opened.view(width)
    assert opened.run("document.documentElement.scrollWidth <= innerWidth")
    measure = "x => [x.scrollWidth > x.clientWidth, getComputedStyle(x).overflowX]"
    boxes = opened.run(f"[...document.querySelectorAll('.scroll')].map({measure})")
    assert all(overflow == "auto" for _, overflow in boxes)
    if width <= 390:
        assert sum(wider for wider, _ in boxes) > 10


def test_text_of_figures_is_large_enough_on_a_phone(opened: Page) -> None:
    opened.view(390)
    # A figure is 7.2 inches wide and its smallest text 7 points high.
    widths = opened.run("[...document.images].map(image => image.getBoundingClientRect().width)")
    assert min(widths) * 7 / 72 / 7.2 >= 7


def test_a_name_of_300_letters_fits_on_a_phone_and_on_paper(window: Page, tmp_path: Path) -> None:
    long = "L" * 300
    value = Number(1.0, 0.1)
    rows = ((long, long, value), ("short", "b", value))
    write_page([Table(long, long, ("net", "settings", "error, %"), rows)], [], tmp_path / "long.html")
    window.view(360)
    window.open(tmp_path / "long.html")
    assert window.run("document.documentElement.scrollWidth <= innerWidth")
    # Its column stays in sight while the others scroll: it must leave room for them.
    assert window.run("document.querySelector('tbody th').getBoundingClientRect().width") < 240
    window.view(1046, media="print")
    assert window.run("document.querySelector('table').getBoundingClientRect().right") <= 1046


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(opened: Page, scheme: str) -> None:
    opened.view(1280, scheme=scheme)
    dark = opened.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    found = opened.run(CONTRAST)
    assert len(found) > 100
    assert found[0][0] >= 4.5, found[:3]


def test_contents_are_open_on_a_desk_and_folded_on_a_phone(window: Page, report: Path) -> None:
    for width, expected in ((1280, True), (390, False)):
        window.view(width)
        window.open(report)
        assert window.run("document.getElementById('contents').open") == expected


def test_print_has_everything_on_paper_and_no_controls(opened: Page) -> None:
    opened.view(794, media="print", scheme="dark")  # A4
    assert opened.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert opened.run("getComputedStyle(document.body).backgroundColor") in ("rgb(255, 255, 255)", "rgba(0, 0, 0, 0)")
    assert opened.run("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    hidden = "[...document.querySelectorAll('.scroll')].filter(x => getComputedStyle(x).overflowX !== 'visible').length"
    assert opened.run(hidden) == 0
    # A4 without its margins: upright for figures and most tables, across for those of many columns.
    for width, what in ((680, "img, section:not(.wide) table"), (1046, ".wide table")):
        opened.view(width, media="print")
        edges = f"[...document.querySelectorAll('{what}')].map(x => x.getBoundingClientRect().right)"
        assert max(opened.run(edges)) <= width
    pdf = base64.b64decode(opened.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    boxes = set(re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf))
    assert {float(width) > float(height) for width, height in boxes} == {False, True}
