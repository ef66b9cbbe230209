"""Finds files of text, and opens them as lines: plain, compressed, or the records of a file as lines of JSON."""

import bz2
import importlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from ..disk import refuse_pointer
from ..errors import ConfigurationError
from .defects import BadLine
from .records import ROWS_OF, json_array

PACKED = (".gz", ".zst", ".xz", ".bz2")
UNPACKERS: dict[str, Callable[[], Any]] = {".xz": lzma.LZMADecompressor, ".bz2": bz2.BZ2Decompressor}
UNPACKERS[".gz"] = lambda: zlib.decompressobj(wbits=31)
UNPACKERS[".zst"] = lambda: zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW).decompressobj()
JSON, PARQUET = (".jsonl", ".ndjson", ".json"), ".parquet"
SPLITS = dict.fromkeys(("train", "training"), "train")  # of a corpus, by the words that name them
SPLITS |= dict.fromkeys(("dev", "val", "valid", "validate", "validation", "eval", "evaluation", "newsdev"), "dev")
SPLITS |= dict.fromkeys(("test", "testing", "devtest", "heldout", "holdout", "tst", "newstest"), "test")
LANGUAGE = r"[a-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*"  # "de", "pt_BR", "zh-Hans"
ROWS = 1_024  # of a Parquet file, read at once
LONGEST_WINDOW = 2**31  # bytes; zstd --long=31
PACKED_BLOCK = 1 << 16  # bytes that are unpacked at once


def unpacked(path: Path) -> Path:
    """Returns the name of a file without the ending of its compression."""
    return path.with_suffix("") if path.suffix in PACKED else path


def ending_of(path: Path) -> str:
    """Returns the ending that names the file's format."""
    return unpacked(path).suffix.lower()


def has_records(path: Path) -> bool:
    """Returns whether each line is a record (`texts_in`)."""
    return ending_of(path) in (*JSON, PARQUET, *ROWS_OF)


_OF_SPLIT = re.compile(  # a file's name without its endings: "wiki.test", "validation-00000-of-00002", "dev.de-en"
    rf"(?:.*[._-])?({'|'.join(SPLITS)})(?:[._-]?\d+(?:-of-\d+)?)?(?:\.[a-z]{{2,3}}(?:[-_][A-Za-z]{{2,4}})?)?",
    re.IGNORECASE,
)


def split_of(path: Path, anywhere: bool = False) -> str | None:
    """Returns "train", "dev" or "test" where a file's name, or else the nearest of its folders, names a split.

    Args:
        anywhere: a word anywhere in the file's name counts, as in ``test_clean`` and ``TrainSet``, behind folders.
    """
    in_folders = next((SPLITS[name.lower()] for name in reversed(path.parent.parts) if name.lower() in SPLITS), None)
    stem = unpacked(path).stem
    if anywhere and in_folders is None:
        words = re.findall("[A-Z]?[a-z]+|[A-Z]+", stem)
        found = {SPLITS[word.lower()] for word in words if word.lower() in SPLITS}
        return next((split for split in ("test", "dev", "train") if split in found), None)
    match = _OF_SPLIT.fullmatch(stem)
    return SPLITS[match[1].lower()] if match else in_folders


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Yields the opened file, to read its uncompressed bytes.

    Raises:
        ConfigurationError: it cannot be opened or unpacked.
    """
    try:
        with _opened(path) as file:
            yield file
    except ConfigurationError:
        raise
    except Exception as error:  # each library raises its own
        raise ConfigurationError(f"{path}: cannot be read ({error}): torn, of another format, or no access") from error


def _opened(path: Path) -> BinaryIO:
    ending = ending_of(path)
    refuse_pointer(path)  # and a pipe, for which the readers below would wait
    if ending == PARQUET:
        return _buffered(_as_lines(_parquet_rows(path)))
    file = _buffered(_unpacked_blocks(path)) if path.suffix in PACKED else path.open("rb")
    rows = ROWS_OF.get(ending)
    if ending == ".json" and file.peek(1 << 10).lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n").startswith(b"["):
        rows = json_array
    return file if rows is None else _buffered(_as_lines(rows(file)))


def _unpacked_blocks(path: Path) -> Iterator[bytes]:
    """Yields the content of an archive of one or more streams, in blocks.

    The libraries' own readers do not notice that a stream is cut off.

    Raises:
        EOFError: it is cut off.
    """
    unpacker: Any = None
    with path.open("rb") as file:
        while packed := file.read(PACKED_BLOCK):
            while packed := packed if unpacker else packed.lstrip(b"\0"):  # zeros may stand between streams
                unpacker = unpacker or UNPACKERS[path.suffix]()
                yield unpacker.decompress(packed)
                packed, unpacker = (unpacker.unused_data, None) if unpacker.eof else (b"", unpacker)
    if unpacker:
        raise EOFError("it is cut off")


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields each row of a Parquet file: its columns of text by name.

    Raises:
        ConfigurationError: pyarrow is not installed.
    """
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigurationError(f"{path} is read by the pyarrow library: pip install 'gpipe-cli[parquet]'") from error
    file = parquet.ParquetFile(path)
    texts = [column.name for column in file.schema_arrow if "string" in str(column.type)]  # structures of texts too
    batches = file.iter_batches(ROWS, columns=texts, use_threads=False)  # there is a process for each core
    return (row for batch in batches for row in batch.to_pylist())


def _buffered(blocks: Iterator[bytes]) -> io.BufferedReader:
    """Returns a buffered file of these blocks."""
    return io.BufferedReader(_Blocks(blocks), 1 << 20)


def _as_lines(rows: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """Yields each record as a line of JSON, so that the number of a record is that of its line."""
    for row in rows:
        yield json.dumps(row, ensure_ascii=False, default=str).encode(errors="surrogatepass") + b"\n"


class _Blocks(io.RawIOBase):
    """Reads as a file the blocks of bytes that an iterator yields."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = bytearray()  # read from a block, not yet given

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer; returns how many bytes it got, 0 at the end."""
        while not self._rest and (block := next(self._blocks, None)) is not None:
            self._rest += block
        given = min(len(buffer), len(self._rest))
        buffer[:given] = self._rest[:given]
        del self._rest[:given]
        return given


def decoded(line: bytes, side: int = 0) -> str:
    """Returns a line's text, without a byte order mark.

    Raises:
        BadLine: it is no text.
    """
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadLine("undecodable", side=side) from error
    if "\0" in text:
        raise BadLine("nul", side=side)
    return text


def texts_in(line: str, names: Sequence[str], key: str) -> list[str]:
    """Returns the texts under these names in a line of JSON, or under its "translation".

    Args:
        key: the configuration key that holds the names; for messages.

    Raises:
        BadLine: it says what is wrong with the line.
    """
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine("malformed", f"is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise BadLine("malformed", "is no JSON object")
    below = content.get("translation")
    content = {**(below if isinstance(below, dict) else {}), **content}
    texts = {name: text for name, text in content.items() if isinstance(text, str)}
    for name in names:
        if name not in texts:
            known = ", ".join(texts) or "nothing"
            raise BadLine("malformed", f"has no text under {name!r} ({key}), only under: {known}")
        if "\0" in texts[name]:
            raise BadLine("nul")
        if re.search("[\ud800-\udfff]", texts[name]):  # which JSON can write
            raise BadLine("malformed", "has half of a surrogate pair")
    return [texts[name] for name in names]
