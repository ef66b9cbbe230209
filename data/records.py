"""Reads pairs of texts from files that are no lines: gettext's catalogues, translation memories, tables, a JSON array.

.po, .mo             msgid and msgstr, plurals form by form; a fuzzy message counts as untranslated, as in gettext
.tmx, .xliff, .xlf   the texts by their languages, as "de-AT" and as "de"
.csv                 by the names in the first line
.json                an array of records; one record a line is read by `lines.py`
"""

import csv
import gettext
import io
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO
from xml.etree import ElementTree

Row = dict[str, Any]
Rows = Callable[[BinaryIO], Iterator[Row]]

MOST_BYTES = 256 << 20  # of a file that is read whole
_DATES = re.compile(rb"PO(T-Creation|-Revision)-Date:")  # of a template, or in words: no dates for babel
_TAGS = ("bpt", "ept", "ph", "it", "ut")  # elements that hold a document's own tags
_UNTRANSLATED = ("new", "needs-translation")  # states of a target in XLIFF, which then may hold the source
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"


def _whole(file: BinaryIO) -> bytes:
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES >> 20} MB, which are read at once: write one record a line (.jsonl)")
    return content


def _dateless(file: BinaryIO) -> io.BytesIO:
    return io.BytesIO(_DATES.sub(rb"X-\1-Date:", _whole(file)))  # as long as before: a .mo file has places of texts


def _po(file: BinaryIO) -> Iterator[Row]:
    from babel.messages.pofile import read_po

    return _messages(read_po(_dateless(file), ignore_obsolete=True))


def _mo(file: BinaryIO) -> Iterator[Row]:
    from babel.messages.mofile import read_mo

    return _messages(read_mo(_dateless(file)))


def _messages(catalogue: Any) -> Iterator[Row]:
    """Yields each form of each message; the form for the number 1 is the singular's, wherever it stands."""
    try:
        of_one = gettext.c2py(catalogue.plural_expr)(1)
    except ValueError:
        of_one = 0
    for message in catalogue:
        ids, texts = (one if isinstance(one, (tuple, list)) else (one,) for one in (message.id, message.string))
        if not ids[0]:
            continue  # the header
        for number, text in enumerate(texts):
            singular = number == of_one and len(texts) > 1
            sides = {"msgid": ids[0] if singular else ids[-1], "msgstr": "" if message.fuzzy else text or ""}
            yield sides | {"comment": " ".join(message.auto_comments)}


def _tmx(file: BinaryIO) -> Iterator[Row]:
    for unit in _elements(file, "tu"):
        row: Row = {}
        for one in unit:
            if _name(one) == "tuv":
                language = one.get(_LANGUAGE) or one.get("lang") or ""
                row |= _by_language(language, next((part for part in one if _name(part) == "seg"), None))
        yield row


def _xliff(file: BinaryIO) -> Iterator[Row]:
    languages = ["", ""]
    for part in _elements(file, "trans-unit", "segment", started=("file", "xliff")):
        if _name(part) in ("file", "xliff"):
            names = ("source-language", "target-language"), ("srcLang", "trgLang")
            languages = [part.get(one) or part.get(two) or old for one, two, old in zip(*names, languages, strict=True)]
            continue
        sides = {_name(child): child for child in part}
        yield {**_by_language(languages[0], sides.get("source")), **_by_language(languages[1], sides.get("target"))}


def _by_language(language: str, element: Any) -> Row:
    text = "" if element is None or element.get("state") in _UNTRANSLATED else _text(element)
    return {language: text, re.split("[-_]", language.lower())[0]: text}


def _text(element: Any) -> str:
    inside = ("" if _name(part) in _TAGS else _text(part) for part in element)
    return (element.text or "") + "".join(text + (part.tail or "") for text, part in zip(inside, element, strict=True))


def _elements(file: BinaryIO, *names: str, started: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yields the elements of these names when they are complete, and the ``started`` ones when they begin."""
    for event, element in ElementTree.iterparse(file, ("start", "end")):
        if _name(element) in (names if event == "end" else started):
            yield element
            if event == "end":
                element.clear()


def _name(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]


def _csv(file: BinaryIO) -> Iterator[Row]:
    rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline=""))
    return ({name: text for name, text in row.items() if isinstance(name, str)} for row in rows)


def json_array(file: BinaryIO) -> Iterator[Row]:
    """Yields the records of one JSON array.

    Raises:
        ValueError: it is none, or larger than `MOST_BYTES`.
    """
    return iter(json.loads(_whole(file)))


ROWS_OF: dict[str, Rows] = {".po": _po, ".mo": _mo, ".tmx": _tmx, ".xliff": _xliff, ".xlf": _xliff, ".csv": _csv}
COLUMNS_OF = {".po": ("msgstr", "msgid"), ".mo": ("msgstr", "msgid")}  # of the source, and of the target language
