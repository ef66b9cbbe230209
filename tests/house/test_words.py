"""Tests that docstrings, class names and lengths of functions follow the rules of the house."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [path for room in ("gpipe_cli", "models", "data", "benchmarks") for path in sorted((ROOT / room).rglob("*.py"))]
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
NO_VERBS = {"This", "Its", "Always", "Others", "Was", "Has", "Is", "As", "Tensors", "Weights", "Seconds", "Bytes"}
LONGEST_FUNCTION = 60  # lines


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Returns the syntax tree of every file; parsed once, when the first test asks."""
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def definitions(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, kinds):
                yield f"{path}: {getattr(node, 'name', 'the module')}", node


def test_a_docstring_begins_with_a_verb() -> None:
    """In the third person: "Returns …", "Holds …"; an exception is "Raised when …"."""
    wrong = []
    for place, node in definitions(ast.Module, ast.ClassDef, ast.FunctionDef):
        text = ast.get_docstring(node) or "Skips"  # type: ignore[arg-type]  # one of the kinds that have docstrings
        word = text.split()[0].strip("`,.:;")
        if word != "Raised" and not (word.isalpha() and word[0].isupper() and word[-1] == "s" and word not in NO_VERBS):
            wrong.append(f"{place}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


def test_a_test_file_says_what_it_tests() -> None:
    """In its first line: "Tests that …"; a helper of tests begins with another verb."""
    first = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in TEST_FILES}
    words = {path: (text or "?").split()[0] for path, text in first.items()}
    assert [path.name for path, word in words.items() if path.name.startswith("test_") != (word == "Tests")] == []
    assert [path.name for path, word in words.items() if not word.endswith("s")] == []


def test_a_class_name_stands_once_in_the_tree() -> None:
    names = Counter(place.rpartition(" ")[2] for place, _ in definitions(ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_function_fits_a_screen() -> None:
    long = [
        place
        for place, node in definitions(ast.FunctionDef)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    ]
    assert long == []
