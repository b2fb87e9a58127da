"""The HTML page of a report: whole, alone, and with everything that it was given."""

from __future__ import annotations

import base64
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fastmoll.report.page import write_page
from fastmoll.report.style import Figure
from fastmoll.report.table import Number, Table

pytest.importorskip("matplotlib")

VOID = {"meta", "link", "img", "br"}


class Document(HTMLParser):
    """Elements of a page; complains about those that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data.strip().replace("\N{NO-BREAK SPACE}", " ")))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def said(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def drawn(folder: Path, name: str, title: str) -> Figure:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7.2, 2.0))
    canvas.subplots().plot([0, 1])
    for ending in ("png", "svg"):
        canvas.savefig(folder / f"{name}.{ending}", dpi=160)
    return Figure(name, title, "A line.", folder / f"{name}.png", folder / f"{name}.svg")


TABLE = Table(
    title="Benchmark",
    note="± is the standard deviation.",
    columns=("data", "augmentation", "corrupted images", "error, %", "settings"),
    rows=(
        ("digits", "fcr", "generated (frost: made)", Number(4.0, 0.1, 1), None),
        ("digits", "none", "generated (frost: made)", Number(-12.25, None, 1), None),
    ),
)


def page(tmp_path: Path, tables: list[Table], figures: list[Figure]) -> Document:
    write_page(tables, figures, tmp_path / "report.html")
    return Document((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_page_asks_for_nothing_outside_of_itself(tmp_path: Path) -> None:
    figure = drawn(tmp_path, "a", "A figure")
    document = page(tmp_path, [TABLE], [figure])
    for _, attributes in document.elements:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert attributes.get(name, "#").startswith(("#", "data:")), attributes
    assert "@import" not in "".join(document.said("style"))
    assert "url(" not in "".join(document.said("style"))
    policy = next(x["content"] for x in document.all("meta") if x.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:;")
    (image,) = document.all("img")
    assert figure.svg is not None
    assert base64.b64decode(image["src"].removeprefix("data:image/svg+xml;base64,")) == figure.svg.read_bytes()
    assert (image["width"], image["height"]) == ("720", "200")
    assert not [*tmp_path.glob("*.part"), *tmp_path.glob(".*.part")]


def test_every_entry_of_the_contents_leads_somewhere_and_no_place_has_two_meanings(tmp_path: Path) -> None:
    figures = [drawn(tmp_path, name, "Tables") for name in ("a", "b")]
    document = page(tmp_path, [TABLE, TABLE], figures)
    places = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(set(places)) == len(places)
    links = [attributes["href"].removeprefix("#") for attributes in document.all("a")]
    assert set(links) <= set(places)
    assert len(set(links)) == 1 + 2 + 4  # to the content, two parts, what is in them


def test_cells_are_shown_and_what_all_rows_share_is_said_once(tmp_path: Path) -> None:
    document = page(tmp_path, [TABLE], [])
    heads = [text for text in document.said("th") if text not in ("fcr", "none")]
    assert heads == ["augmentation", "error, %"]
    assert document.said("td") == ["4.0 ± 0.1", "−12.2"]
    assert "In all rows: data digits, corrupted images generated (frost: made)." in document.said("p")
    assert TABLE.note in document.said("p")
    assert [x.get("class") for x in document.all("td")] == ["number"] * 2


def test_a_single_row_keeps_all_its_columns(tmp_path: Path) -> None:
    table = Table(title="One", note="A note.", columns=TABLE.columns, rows=TABLE.rows[:1])
    document = page(tmp_path, [table], [])
    assert document.said("th") == [*TABLE.columns, "digits"]
    assert document.said("td") == ["fcr", "generated (frost: made)", "4.0 ± 0.1", "–"]


def test_what_is_left_out_is_listed_with_its_reason(tmp_path: Path) -> None:
    empty = Table(title="Architectures", note="One network.", columns=("a",), rows=())
    missing = Figure("x", "Spectra", "it needs pictures", None, None)
    document = page(tmp_path, [empty, TABLE], [missing])
    assert document.said("li") == ["Architectures: One network.", "Spectra: it needs pictures"]
    assert len(document.all("table")) == 1
    assert document.all("img") == []
    assert any(text.startswith("1 table. 2 more have nothing to show") for text in document.said("p"))


def test_the_page_says_what_its_figures_are(tmp_path: Path) -> None:
    relative = Table("Relative", "", ("mCE (AlexNet), %",), ((Number(70.0),),))
    for tables in ([TABLE], [TABLE, relative]):
        said = page(tmp_path, tables, []).said("p")
        (text,) = [" ".join(text.split()) for text in said if text.startswith("Error: ")]
        assert all(f"{name}: " in text for name in ("Error", "NLL", "ECE", "adaptive ECE"))
        assert ("mCE: " in text) == (relative in tables)
        assert text.endswith("Lower is better in all of them.")


def test_names_of_users_cannot_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&"
    table = Table(title=evil, note=evil, columns=(evil, "b"), rows=((evil, evil), ("x", "y")))
    document = page(tmp_path, [table], [drawn(tmp_path, "a", evil)])
    assert len(document.all("script")) == 1
    assert document.said("h3") == [evil] * 2
    assert evil in document.said("td")
    assert document.all("img")[0]["alt"] == f"{evil}. A line."


def test_the_rows_of_a_column_are_looked_at_a_fixed_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    usual = Table.numeric

    def numeric(table: Table, column: int) -> bool:
        seen.append(column)
        return usual(table, column)

    monkeypatch.setattr(Table, "numeric", numeric)
    page(tmp_path, [Table("Long", "", ("a", "b"), tuple((str(x), x) for x in range(50)))], [])
    assert len(seen) < 10
