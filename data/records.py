"""Reads pairs of texts from files that are no lines: gettext's catalogues, translation memories, tables, a JSON array.

.po, .mo             msgid and msgstr, plurals form by form; a fuzzy message counts as untranslated, as in gettext
.tmx, .xliff, .xlf   the texts by their languages, as "de-AT", "de_AT" and "de"; of XLIFF also as source and target
.csv                 by the names in the first line, which languages may be too; it tells the delimiter
.json                an array of records; one record a line is read by `lines.py`
"""

import codecs
import csv
import gettext
import io
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, BinaryIO
from xml.etree import ElementTree

Row = dict[str, Any]
Rows = Callable[[BinaryIO], Iterator[Row]]

MOST_BYTES = 256 << 20  # of a file that is read whole
UNREADABLE = "\0"  # the name in a record of what makes it unreadable
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_PO = re.compile(r'(msgctxt|msgid(?:_plural)?|msgstr(?:\[\d+\])?)?\s*"((?:[^"\\]|\\.)*)"')
_BEGINS = re.compile("#|msgctxt|msgid(?!_)")  # the next message in a .po file
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_MAGIC = 0x950412DE  # of a .mo file
_TAGS = ("bpt", "ept", "ph", "it", "ut")  # elements that hold a document's own tags
_UNTRANSLATED = {"new", "needs-translation", "initial"}  # states in XLIFF; the target may then hold the source
_MISSING = ElementTree.Element("missing")
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
_CODE = re.compile("[A-Za-z]{2,3}(?:[-_](?:[A-Za-z]{4}|[A-Za-z]{2}|[0-9]{3}))*")  # a language in a table's first line


def _whole(file: BinaryIO) -> bytes:
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES >> 20} MB, which are read at once: write one record a line (.jsonl)")
    return content


def _encoding(start: bytes, usual: str = "utf-8") -> str:
    return next((name for mark, name in _MARKS.items() if start.startswith(mark)), usual)


def _po(file: BinaryIO) -> Iterator[Row]:
    content = _whole(file)
    lines = content.decode(_encoding(content, _charset(content)), "surrogateescape").split("\n")
    message, notes, key, of_one = dict[str, str](), list[str](), "", 0
    for number, line in enumerate(chain(map(str.strip, lines), "#"), 1):
        if _BEGINS.match(line) and "msgid" in message:
            texts = [message[name] for name in sorted(message) if name.startswith("msgstr")]
            of_one = of_one if message["msgid"] else _form_of_one("".join(texts))
            if any(note.startswith("#,") and "fuzzy" in note for note in notes):
                texts = [""] * len(texts)
            comment = " ".join(note[2:].strip() for note in notes if note.startswith("#."))
            yield from _forms([message[n] for n in ("msgid", "msgid_plural") if n in message], texts, of_one, comment)
            message, notes = {}, []
        if line.startswith("#"):
            notes = [] if line.startswith("#~") else [*notes, line]  # those of an obsolete message end with it
        elif found := _PO.fullmatch(line):
            key = found[1] or key
            before = "" if found[1] else message.get(key, "")
            message[key] = before + re.sub(r"\\(.)", lambda of: _ESCAPES.get(of[1], of[1]), found[2])
        elif line:
            yield {UNREADABLE: f"has no message: line {number} of the file is {line[:80]}"}
            message, notes, key = {}, [], UNREADABLE


def _mo(file: BinaryIO) -> Iterator[Row]:
    content = _whole(file)
    order = "<" if content.startswith(struct.pack("<I", _MAGIC)) else ">"
    magic, _, count, *tables = struct.unpack_from(f"{order}5I", content)
    places = [struct.unpack_from(f"{order}{2 * count}I", content, table) for table in tables]
    if magic != _MAGIC or any(
        sum(column[i : i + 2]) > len(content) for column in places for i in range(0, 2 * count, 2)
    ):
        raise ValueError("it is cut off, or none")
    sides = [[content[at : at + n] for n, at in zip(of[::2], of[1::2], strict=True)] for of in places]
    header = dict(zip(*sides, strict=True)).get(b"", b"")
    charset, of_one = _charset(header), _form_of_one(header.decode("latin-1"))
    for ids, texts in zip(*([text.decode(charset, "surrogateescape") for text in side] for side in sides), strict=True):
        yield from _forms(ids.rpartition("\4")[2].split("\0"), texts.split("\0"), of_one)


def _charset(content: bytes) -> str:
    """Returns the encoding that a catalogue's header names; UTF-8 in a template, which names none."""
    for name in re.findall(rb"charset=([-\w.:]+)", content)[:1]:
        with suppress(LookupError):
            return codecs.lookup(name.decode()).name
    return "utf-8"


def _form_of_one(header: str) -> int:
    """Returns the plural form of the number 1; the first, if the header does not tell, as in a template."""
    told = re.search(r"\bplural=([^;\n]+)", header)
    try:
        return gettext.c2py(told[1])(1) if told else 0
    except (ValueError, ZeroDivisionError):
        return 0


def _forms(ids: Sequence[str], texts: Sequence[str], of_one: int, comment: str = "") -> Iterator[Row]:
    """Yields each form of a message; the form for the number 1 is the singular's, wherever it stands."""
    for number, text in enumerate(texts or [None]) if ids[0] else ():  # without an id it is the header
        singular = number == of_one and len(texts) > 1
        yield {"msgid": ids[0] if singular else ids[-1], "msgstr": text, "comment": comment}


def _tmx(file: BinaryIO) -> Iterator[Row]:
    for unit, _ in _elements(file, "tu"):
        texts = [one for one in unit if _name(one) == "tuv"]
        segments = (next((part for part in one if _name(part) == "seg"), _MISSING) for one in texts)
        languages = (one.get(_LANGUAGE) or one.get("lang") or "" for one in texts)
        yield _by_language(zip(languages, map(_text, segments), strict=True))


def _xliff(file: BinaryIO) -> Iterator[Row]:
    for unit, given in _elements(file, "trans-unit", "segment"):
        sides = {_name(child): child for child in unit}
        source, target = sides.get("source", _MISSING), sides.get("target", _MISSING)
        is_open = given.get("translate") == "no" or {unit.get("state"), target.get("state")} & _UNTRANSLATED
        row = {"source": _text(source), "target": "" if is_open else _text(target)}
        of_source = source.get(_LANGUAGE) or given.get("source-language") or given.get("srcLang", "")
        of_target = target.get(_LANGUAGE) or given.get("target-language") or given.get("trgLang", "")
        yield {**row, **_by_language(zip((of_source, of_target), row.values(), strict=True))}


def _by_language(texts: Iterable[tuple[str, str]]) -> Row:
    """Returns the texts by the names of their languages; "de-AT" is "de", too, unless another text is."""
    row: Row = {}
    for language, text in texts:
        for name in (re.split("[-_]", language.lower())[0], language.replace("-", "_")):
            row.setdefault(name, text)
        row[language] = text
    return row


def _text(element: Any) -> str:
    inside = ("" if _name(part) in _TAGS else _text(part) for part in element)
    return (element.text or "") + "".join(text + (part.tail or "") for text, part in zip(inside, element, strict=True))


def _elements(file: BinaryIO, *names: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """Yields the elements of these names, and the attributes of each and of those around it."""
    given: list[dict[str, str]] = [{}]
    for event, element in ElementTree.iterparse(file, ("start", "end")):
        if event == "start":
            given.append({**given[-1], **element.attrib})
        elif (around := given.pop()) is not None and _name(element) in names:
            yield element, around
            element.clear()


def _name(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]


def _csv(file: Any) -> Iterator[Row]:
    lines = io.TextIOWrapper(file, _encoding(file.peek(4)), "surrogateescape", newline="")
    first = lines.readline()
    told = re.fullmatch(r'"?sep=(.)"?\s*', first)  # by Excel
    first = lines.readline() if told else first
    mark = told[1] if told else max(",;\t|", key=lambda mark: len(next(csv.reader([first], delimiter=mark), ())))
    rows = csv.DictReader(chain([first], lines), delimiter=mark, skipinitialspace=f"{mark} " in first)
    try:
        for row in rows:
            texts = {name.strip(): text for name, text in row.items() if name is not None and text is not None}
            yield {**texts, **_by_language(pair for pair in texts.items() if _CODE.fullmatch(pair[0]))}
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}") from error


def json_array(file: BinaryIO) -> Iterator[Row]:
    """Yields the records of one JSON array.

    Raises:
        ValueError: it is none, or larger than `MOST_BYTES`.
    """
    return iter(json.loads(_whole(file)))


ROWS_OF: dict[str, Rows] = {".po": _po, ".mo": _mo, ".tmx": _tmx, ".xliff": _xliff, ".xlf": _xliff, ".csv": _csv}
READING = 2  # raised when a file would give other records
CATALOGUES, MEMORIES = (".po", ".mo"), (".tmx", ".xliff", ".xlf")
