"""Collects wheels for a machine without a network: this package and its dependencies, but not torch.

    python -m benchmarks.gpu.wheelhouse 3.12 wheelhouse

The first argument is the Python of that machine (Linux, x86-64), the second a folder. torch, and torchvision, which
goes with it, are that machine's own. pip must be there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OWN_THERE = ("torch", "torchvision")
FOR_TESTS = ("pytest", "pytest-timeout")
WITHOUT_WHEEL = "antlr4-python3-runtime==4.9.*"  # needed by hydra-core; PyPI has its source only
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]


def requirements() -> list[str]:
    """Returns the dependencies beside torch, as pyproject.toml names them."""
    from pip._vendor import tomli  # Python itself reads TOML only since 3.11

    project: dict[str, Any] = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tests = [each for each in project["optional-dependencies"]["dev"] if _name(each) in FOR_TESTS]
    return [each for each in (*project["dependencies"], *tests) if _name(each) not in OWN_THERE]


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]


def collect(python: str, folder: Path) -> None:
    """Fills the folder with wheels for that release of Python."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, WITHOUT_WHEEL, ROOT], check=True)
    target = ["--only-binary", ":all:", "--python-version", python, *(f"--platform={each}" for each in PLATFORMS)]
    subprocess.run([*pip, "download", "--dest", folder, "--find-links", folder, *target, *requirements()], check=True)


if __name__ == "__main__":
    version = re.search(r"3\.\d+", sys.argv[1])  # 3.12, or python3.12
    if version is None or len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.gpu.wheelhouse 3.12 FOLDER")
    collect(version[0], Path(sys.argv[2]))
