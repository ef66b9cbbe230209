"""Holds the report of a run, a sweep, a plan or a table, and renders it as text and as a page.

A page is one HTML file without scripts that loads nothing: page.html is its template, and pictures stand in it.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

from gpipe_cli.disk import write_whole
from gpipe_cli.svg import COLOURS, Drawing
from gpipe_cli.terminal.text import is_number, number, text_table

KEY_WIDTH = 12  # at least, of facts on a console


class Cell(NamedTuple):
    """Holds a cell of a table that a page shows as a link, as a bar or on a blue ground.

    Attributes:
        address: link to another file.
        bar, shade: width of the bar, strength of the blue, as "30%".
    """

    text: str = ""
    address: str = ""
    bar: str = ""
    shade: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Lines:
    """Holds lines.

    Attributes:
        kind: "" paragraphs, "* " notes, "## " the title of a section, "```" words to type.
    """

    lines: Sequence[str]
    kind: str = ""

    def text(self) -> str:
        return "\n".join(f"* {line}" if self.kind == "* " else line for line in self.lines)


@dataclass(frozen=True)
class Facts:
    """Holds (name, figure) for each line; lines with None or an empty text are left out."""

    rows: Sequence[tuple[str, object]]

    @property
    def shown(self) -> list[tuple[str, str]]:
        return [(name, number(value)) for name, value in self.rows if value is not None and value != ""]

    def text(self) -> str:
        width = max([KEY_WIDTH, *(len(name) + 2 for name, _ in self.shown)])
        return "\n".join(f"{name:<{width}}{value}" for name, value in self.shown)


@dataclass(frozen=True)
class Grid:
    """Holds a table.

    Attributes:
        title: the table's title on a page; empty: none.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""

    @property
    def classes(self) -> list[Markup]:
        """Returns the HTML attribute of each column's cells: numbers are aligned to the right."""
        right = [all(is_number(row[place]) for row in self.rows) for place in range(len(self.columns))]
        return [Markup(' class="n"' if flush else "") for flush in right]

    def text(self) -> str:
        return text_table(self.columns, self.rows)


class Image(NamedTuple):
    """Holds an SVG or PNG file; ``alt`` says what it shows. No code in it runs on a page."""

    content: bytes
    alt: str

    @property
    def address(self) -> str:
        kind = "png" if self.content.startswith(b"\x89PNG") else "svg+xml"
        return f"data:image/{kind};base64,{b64encode(self.content).decode()}"


@dataclass(frozen=True)
class Images:
    """Holds images, which only pages show: large ones, or, with a title, small ones with a text below each."""

    images: Sequence[Image]
    title: str = ""


Block = Lines | Facts | Grid | Images | Drawing


@dataclass(frozen=True)
class Document:
    """Holds blocks below a title."""

    title: str
    blocks: Sequence[Block]

    def text(self) -> str:
        """Returns the document for a console, without its title and pictures."""
        texts = (block.text() for block in self.blocks if not isinstance(block, (Images, Drawing)))
        return "\n\n".join(filter(None, texts))

    def html(self) -> str:
        blocks = [(type(block).__name__, block) for block in self.blocks]
        return _template().render(title=self.title, blocks=blocks, colours=COLOURS)

    def save(self, path: Path) -> None:
        """Writes the document as an HTML page, whole or not at all."""
        write_whole(path, self.html())


@cache
def _template() -> Template:
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["number"] = number
    return environment.get_template("page.html")
