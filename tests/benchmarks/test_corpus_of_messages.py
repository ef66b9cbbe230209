"""Tests the corpus of translated messages on wheels that are made on the spot."""

import io
import json
import random
import zipfile
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import write_po

from benchmarks import messages

WORDS = ["page", "user", "image", "password", "group", "report", "address", "archive", "restore", "approve", "every"]
DRAWN = [random.Random(number).choices(WORDS, k=6) for number in range(200)]
ENGLISH = [" ".join([*drawn, last]) for drawn in DRAWN for last in ("now", "later")]  # each beside a near copy


def wheel(folder: Path, name: str, licence: str, files: dict[str, bytes | str]) -> None:
    folder.mkdir(exist_ok=True)
    about = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as made:
        for file, content in {f"{name}-1.0.dist-info/METADATA": about, **files}.items():
            made.writestr(file, content)


def catalogue(language: str, english: list[str], is_compiled: bool = False) -> bytes:
    """Returns a catalogue in which each word has the language before it."""
    made, file = Catalog(language), io.BytesIO()
    for message in english:
        made.add(message, " ".join(f"{language}{word}" for word in message.split()))
    (write_mo if is_compiled else write_po)(file, made)
    return file.getvalue()


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a package in two languages, and one that is held out as a whole."""
    monkeypatch.setattr(messages, "FEWEST_LANGUAGES", 2)
    monkeypatch.setattr(messages, "FEWEST_PAIRS", 100)
    own = ["run the current script again", *ENGLISH[:5]]
    for name, english in (("shop", ENGLISH), ("editor", own)):
        places = {"de": "locale/de/LC_MESSAGES/django.po", "fr": "translations/fr_FR.mo"}
        files = {f"{name}/{place}": catalogue(of, english, of == "fr") for of, place in places.items()}
        wheel(tmp_path / "wheels", name, "MIT", {**files, f"{name}-1.0.dist-info/LICENSE": "Permission is granted"})
    return tmp_path / "wheels"


def make(wheels: Path, folder: Path, *more: str) -> Path:
    messages.main([str(folder), "--wheels", str(wheels), "--second-test", "editor", *more])
    return folder


def test_a_corpus_of_wheels_is_split_by_messages_and_near_copies_stay_together(
    wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(wheels, tmp_path / "made")
    told = capsys.readouterr().out  # each of the slow steps
    assert all(step in told for step in ("dividing ", "writing ", "BLEU of copying the source, second_test"))
    sides = {split: set(lines(made / f"corpus/de-en/{split}.en")) for split in ("train", "dev", "test")}
    assert lines(made / "corpus/fr-en/train.fr")[0].startswith("fr") and not sides["dev"] & sides["test"]
    for held_out in (sides["dev"], sides["test"]):
        assert len(held_out) > 9
        words = [message.split() for message in held_out]
        assert not [one for one in words for other in sides["train"] if one[:-1] == other.split()[:-1]]
    assert lines(made / "second_test/de-en/test.en") == ["run the current script again"]
    assert "Permission is granted" in (made / "notices" / "shop.txt").read_text()
    again = make(wheels, tmp_path / "again", "--augmented")
    copied = [lines(again / f"corpus/eng-en/train.{side}") for side in ("eng", "en")]
    own = len(sides["train"])
    assert copied[0] == copied[1] and set(copied[0][:own]) == sides["train"] and len(copied[0]) == own + own // 3
    german, english = (lines(again / f"corpus/de-en/train.{side}") for side in ("de", "en"))
    assert (german[own], english[own]) == (f"{german[0]} {german[1]}", f"{english[0]} {english[1]}")
    counts = json.loads((made / "counts.json").read_text())
    assert counts["digest"] == json.loads((again / "counts.json").read_text())["digest"]
