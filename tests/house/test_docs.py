"""Tests that what the pages of the project name is there: links, headings, tests, benchmarks and typed keys."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from gpipe_cli.config import TYPED, VerifyConfig
from gpipe_cli.planner.options import Options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "tests/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
SECTIONS = {**TYPED, "verify": VerifyConfig, "plan": Options}


def anchors(page: Path) -> set[str]:
    """Returns the names under which a page's headings can be linked."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def wrong_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert list(wrong_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_and_benchmarks_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"\btests/[\w/]+\.py", text):
        assert (ROOT / path).exists(), path
    for path, name in re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", text):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), name
    for name in re.findall(r"python3? -m (benchmarks[\w.]*\w)", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_of_typed_sections_that_a_page_names_exist(page: Path) -> None:
    known = {key for section, kind in SECTIONS.items() for key in (f"{section}.{field.name}" for field in fields(kind))}
    pattern = rf"(?<![\w/.-])((?:{'|'.join(SECTIONS)})\.[a-zA-Z_]+)(?![\w(/])"
    named = re.findall(pattern, page.read_text(encoding="utf-8"))
    files = {f"{section}.{suffix}" for section in SECTIONS for suffix in ("py", "svg", "json", "yaml", "md")}
    assert {key for key in named if key not in known | files} == set()


@pytest.mark.parametrize("file", [".github/workflows/checks.yml", ".pre-commit-config.yaml"])
def test_checks_elsewhere_call_targets_that_make_has(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    called = re.findall(r"(?:run|entry): make (\w+)", text)
    assert called and {*called} <= {*targets}
    oldest = re.findall(r'"torch>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert all(torch.startswith(oldest[0]) for torch in re.findall(r'torch: "([\d.]+)"', text))
    assert yaml.safe_load(text)
