"""Reads pairs of texts from files that are no lines: gettext's catalogues, translation memories, tables, a JSON array.

.po, .mo             msgid and msgstr, plurals form by form; a fuzzy message counts as untranslated, as in gettext
.tmx                 the texts by their languages, as "de-AT", "de_AT" and "de"
.csv                 by the names in the first line, which languages may be too; it tells the delimiter
.json                an array of records; one record a line is read by `lines.py`
"""

import codecs
import csv
import gettext
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, BinaryIO
from xml.etree import ElementTree

Row = dict[str, Any]
Rows = Callable[[BinaryIO], Iterator[Row]]

_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_DATES = re.compile(rb"PO(T-Creation|-Revision)-Date:")  # of a template, or in words: no dates for babel
_TEMPLATE = {rb"charset=CHARSET": b"charset=UTF-8", rb"nplurals=INTEGER; plural=EXPRESSION": b"nplurals=2; plural=n!=1"}
_TAGS = ("bpt", "ept", "ph", "it", "ut")  # elements that hold a document's own tags
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
_CODE = re.compile("[A-Za-z]{2,3}(?:[-_](?:[A-Za-z]{4}|[A-Za-z]{2}|[0-9]{3}))*")  # a language in a table's first line


def _encoding(start: bytes) -> str:
    """Returns the encoding that a byte order mark says, else UTF-8."""
    return next((name for mark, name in _MARKS.items() if start.startswith(mark)), "utf-8")


def _dateless(content: bytes) -> io.BytesIO:
    """Returns a catalogue whose dates babel does not read, because templates have words there."""
    return io.BytesIO(_DATES.sub(rb"X-\1-Date:", content))  # as long as before: a .mo file has places of texts


def _po(file: BinaryIO) -> Iterator[Row]:
    """Yields the messages of a .po file; babel prints which it cannot read."""
    from babel.messages.pofile import read_po

    content = file.read()
    if (encoding := _encoding(content)) != "utf-8":
        content = re.sub(rb"charset=[-\w]+", b"charset=UTF-8", content.decode(encoding).encode(), count=1)
    for pattern, mended in _TEMPLATE.items():
        content = re.sub(pattern, mended, content, count=1)
    yield from _messages(read_po(_dateless(content), ignore_obsolete=True))


def _mo(file: BinaryIO) -> Iterator[Row]:
    from babel.messages.mofile import read_mo

    return _messages(read_mo(_dateless(file.read())))


def _messages(catalogue: Any) -> Iterator[Row]:
    """Yields msgid and msgstr of each plural form of each message.

    The form for the number 1 has the singular as its msgid, wherever it stands.
    """
    try:
        form_of_one = gettext.c2py(catalogue.plural_expr)(1)
    except ValueError:
        form_of_one = 0
    for message in catalogue:
        # With plural forms the id is (singular, plural), and there is one text for each form.
        ids, texts = (text if isinstance(text, (tuple, list)) else (text,) for text in (message.id, message.string))
        for form, text in enumerate(texts) if ids[0] else ():  # without an id it is the header
            msgid = ids[0] if form == form_of_one and len(texts) > 1 else ids[-1]
            msgstr = "" if message.fuzzy else text or ""
            yield {"msgid": msgid, "msgstr": msgstr, "comment": " ".join(message.auto_comments)}


def _tmx(file: BinaryIO) -> Iterator[Row]:
    """Yields the texts of each unit of a translation memory by their languages."""
    for _, unit in ElementTree.iterparse(file):
        if _name(unit) == "tu":
            variants = unit.findall("{*}tuv")
            languages = [variant.get(_LANGUAGE) or variant.get("lang") or "" for variant in variants]
            segments = [variant.find("{*}seg") for variant in variants]
            texts = ["" if segment is None else _text(segment) for segment in segments]
            yield _by_language(zip(languages, texts, strict=True))
            unit.clear()


def _by_language(texts: Iterable[tuple[str, str]]) -> Row:
    """Returns the texts by the names of their languages; "de-AT" is "de", too, unless another text is."""
    row: Row = {}
    for language, text in texts:
        for name in (re.split("[-_]", language.lower())[0], language.replace("-", "_")):
            row.setdefault(name, text)
        row[language] = text
    return row


def _text(element: Any) -> str:
    """Returns the text in an element, without a document's own tags."""
    inside = ("" if _name(part) in _TAGS else _text(part) for part in element)
    return (element.text or "") + "".join(text + (part.tail or "") for text, part in zip(inside, element, strict=True))


def _name(element: Any) -> str:
    """Returns an element's name without its namespace."""
    return str(element.tag).rpartition("}")[2]


def _csv(file: Any) -> Iterator[Row]:
    """Yields the rows of a table by the names in its first line. The delimiter is the one that divides it most."""
    lines = io.TextIOWrapper(file, _encoding(file.peek(4)), "surrogateescape", newline="")
    first = lines.readline()
    told = re.fullmatch(r'"?sep=(.)"?\s*', first)  # by Excel
    first = lines.readline() if told else first
    mark = told[1] if told else max(",;\t|", key=lambda mark: len(next(csv.reader([first], delimiter=mark), ())))
    rows = csv.DictReader(chain([first], lines), delimiter=mark, skipinitialspace=f"{mark} " in first)
    for row in rows:
        texts = {name.strip(): text for name, text in row.items() if name is not None and text is not None}
        yield {**texts, **_by_language(pair for pair in texts.items() if _CODE.fullmatch(pair[0]))}


def json_array(file: BinaryIO) -> Iterator[Row]:
    """Yields the records of one JSON array.

    Raises:
        ValueError: it is none.
    """
    return iter(json.load(file))


ROWS_OF: dict[str, Rows] = {".po": _po, ".mo": _mo, ".tmx": _tmx, ".csv": _csv}
CATALOGUES, MEMORY = (".po", ".mo"), ".tmx"
