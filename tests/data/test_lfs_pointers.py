"""Tests that a pointer of Git LFS is never taken for the file that it stands for, whatever kind of file that is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal_of
from text_sources import prepared

from gpipe_cli.checkpoint.foreign import open_foreign
from gpipe_cli.data.images import tars
from gpipe_cli.data.images.files import ImageFiles
from gpipe_cli.data.parallel.source import ParallelTextSource
from gpipe_cli.data.source import no_report
from gpipe_cli.data.text.source import TextFilesSource
from gpipe_cli.data.vocabulary import read_vocabulary

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 12345\n"
KINDS: dict[str, Callable[[Path], Any]] = {  # the name of a file: what reads it
    "text/train.txt": lambda file: prepared(TextFilesSource, file.parent, {}),
    "text/train.jsonl.gz": lambda file: prepared(TextFilesSource, file.parent, {}),
    "text/train-00000-of-00001.parquet": lambda file: prepared(TextFilesSource, file.parent, {}),
    "text/de-en/train.tsv": lambda file: prepared(ParallelTextSource, file.parents[1], {}),
    "tokenizer.json": read_vocabulary,
    "source.model": read_vocabulary,
    "model.safetensors": lambda file: open_foreign(file, print),
    "model.pt": lambda file: open_foreign(file, print),
    "cat/1.jpg": lambda file: ImageFiles(file.parents[1], ["cat/1.jpg"], [0], ["cat"]).read(0),
    "0000.tar": lambda file: tars.read_tars([file], no_report),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_pointer_is_refused_by_its_name_with_what_fetches_the_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(POINTER)
    assert f"{file} is a pointer of Git LFS, not the file: fetch it with git lfs pull" in refusal_of(KINDS[name], file)
