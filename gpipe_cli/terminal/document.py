"""Holds the report of a run, a sweep, a plan or a table, and renders it as text and as a page.

A page is one HTML file without scripts that loads nothing: pictures stand in it.
"""

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from gpipe_cli.disk import write_whole
from gpipe_cli.svg import COLOURS, DARK
from gpipe_cli.terminal.text import is_number, number, text_table

_POLICY = "default-src 'none';img-src data:;style-src 'unsafe-inline'"
KEY_WIDTH = 12  # at least, of facts on a console
_LIGHT, _DARK = ("".join(f"--{name}:{both[dark]};" for name, both in COLOURS.items()) for dark in (0, 1))
_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_CSS = f":root{{{_LIGHT}}}{DARK}{{:root{{{_DARK}}}}}\n{_STYLE}"


class Link(NamedTuple):
    """Holds text that leads to another file on a page."""

    text: str
    address: str

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

    def html(self) -> str:
        if self.kind == "```":
            return f"<pre>{escape(self.text())}</pre>"
        tag = {"* ": "li", "## ": "h2"}.get(self.kind, "p")
        items = "\n".join(f"<{tag}>{_inline(line)}</{tag}>" for line in self.lines)
        return f"<ul>{items}</ul>" if tag == "li" else items


@dataclass(frozen=True)
class Facts:
    """Holds figures by name, a line each; None and empty texts are left out."""

    rows: Sequence[tuple[str, object]]

    def _shown(self) -> list[tuple[str, str]]:
        return [(name, number(value)) for name, value in self.rows if value is not None and value != ""]

    def text(self) -> str:
        rows = self._shown()
        width = max([KEY_WIDTH, *(len(name) + 2 for name, _ in rows)])
        return "\n".join(f"{name:<{width}}{value}" for name, value in rows)

    def html(self) -> str:
        rows = "\n".join(f"<dt>{escape(name)}</dt><dd>{_inline(value)}</dd>" for name, value in self._shown())
        return f"<dl>{rows}</dl>"


@dataclass(frozen=True)
class Grid:
    """Holds a table."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def text(self) -> str:
        return text_table(self.columns, self.rows)

    def html(self) -> str:
        right = [all(is_number(row[i]) for row in self.rows) for i in range(len(self.columns))]
        kinds = [' class="n"' if flush else "" for flush in right]
        head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(self.columns, kinds, strict=True))
        body = "\n".join(
            "<tr>" + "".join(f"<td{kind}>{_inline(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
            for row in self.rows
        )
        return f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


@dataclass(frozen=True)
class Picture:
    """Holds a picture, for a page alone.

    Attributes:
        svg: the document.
        alt: what it shows, in words, of an image.
        trusted: False: the document comes from a file, so a page shows it as an image, in which nothing runs.
    """

    svg: str
    alt: str = ""
    trusted: bool = True

    def text(self) -> str:
        return ""

    def html(self) -> str:
        if not self.trusted:
            content = b64encode(self.svg.encode()).decode()
            return f'<figure><img alt="{escape(self.alt)}" src="data:image/svg+xml;base64,{content}"></figure>'
        inside = re.sub(r' xmlns="[^"]*"', "", self.svg[self.svg.find("<svg") :])  # HTML needs none
        return f"<figure>{inside}</figure>"


Block = Lines | Facts | Grid | Picture


@dataclass(frozen=True)
class Document:
    """Holds blocks below a title."""

    title: str
    blocks: Sequence[Block]

    def text(self) -> str:
        """Returns the document for a console, without its title."""
        return "\n\n".join(filter(None, (block.text() for block in self.blocks)))

    def html(self) -> str:
        title = escape(self.title)
        meta = [
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        ]
        head = f"<head>{''.join(meta)}<title>{title}</title><style>{_CSS}</style></head>"
        body = "\n".join(block.html() for block in self.blocks)
        return f'<!doctype html>\n<html lang="en">{head}\n<body><main><h1>{title}</h1>\n{body}\n</main></body></html>\n'

    def save(self, path: Path) -> None:
        """Writes the page, as a whole."""
        write_whole(path, self.html())


def _inline(value: object) -> str:
    if isinstance(value, Link):
        return f'<a href="{escape(value.address)}">{escape(value.text)}</a>'
    return escape(number(value), quote=False)
