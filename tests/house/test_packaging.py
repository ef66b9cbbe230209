"""Tests that the package is complete, rooms import one way, and a wheel works outside the clone."""

import ast
import functools
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with `build`, which the tests need anyway

ROOT = Path(__file__).parents[2]
SIDE_BY_SIDE = ("conf", "models", "data")  # packages that stand beside gpipe_cli/ in the clone
TABLES = "benchmarks/tables"  # the benchmarks that the package needs: gpipe-bench measures by them
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Who may import whom: the rooms of the house, from the ground up. A module may import from its own room and from those
# named beside it, whether at its top, inside a function or for type checking only. `docs/design.md` draws the same.
FILES = "config cpu disk errors gpus json_files layers micro_batch parent position svg typed_section"
GROUND = {"", "version", *FILES.split()}  # single files that every room may use
BELOW = {
    "conf": "",
    "models": "",
    "data": "",
    "tasks": "",
    "launch": "",
    "schedule": "",
    "terminal": "data launch",
    "pipeline": "launch schedule",
    "distributed": "launch partition pipeline schedule tasks",
    "partition": "pipeline schedule",
    "checkpoint": "data pipeline",
    "optim": "checkpoint pipeline",
    "metrics": "data pipeline schedule tasks",
    "decoding": "data distributed metrics pipeline schedule tasks",
    "factory": "data distributed models partition pipeline schedule tasks",
    "comparison": "data factory models partition pipeline schedule tasks",
    "trainer": "checkpoint comparison data decoding distributed factory launch metrics optim partition pipeline "
    "planner schedule tasks",
    "library": "checkpoint comparison distributed factory models partition pipeline tasks",
    "inference": "data decoding distributed launch metrics trainer",
    "verify": "checkpoint comparison data distributed factory launch metrics models pipeline schedule tasks trainer",
    "planner": "data distributed factory launch optim partition pipeline schedule",
    "benchmarks": "distributed jobs launch metrics models partition pipeline planner schedule terminal",
    "jobs": "checkpoint conf data launch schedule terminal",
    "commands": "benchmarks checkpoint data jobs launch metrics planner schedule tasks terminal",
}
ROOMS = {room: set(below.split()) for room, below in BELOW.items()}


def test_a_command_is_the_module_of_its_name() -> None:  # `workers.run_command` needs no installation
    for command, target in PROJECT["project"]["scripts"].items():
        assert target == f"gpipe_cli.commands.{command.removeprefix('gpipe-')}:main"


def source_files() -> dict[str, Path]:
    """Returns every module of the package by its name below gpipe_cli ("" is gpipe_cli itself)."""
    roots = {"": ROOT / "gpipe_cli", **{name.replace("/", "."): ROOT / name for name in (*SIDE_BY_SIDE, TABLES)}}
    found = {}
    for prefix, folder in roots.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join([*([prefix] if prefix else []), *parts])] = path
    return found


MODULES = source_files()


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@functools.cache
def imports_of(module: str) -> set[str]:
    """Returns the modules below gpipe_cli that a module imports: at its top, in functions, for type checking only."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    package = f"gpipe_cli.{package}".rstrip(".")
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            below = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name.removeprefix("gpipe_cli.") in MODULES else base for name in below}
    own = {name.removeprefix("gpipe_cli").removeprefix(".") for name in found if name.startswith("gpipe_cli")}
    return own - {module}


def room_of(module: str) -> str:
    return module.partition(".")[0]


def test_imports_run_one_way() -> None:
    wrong = []
    for module in MODULES:
        if (room := room_of(module)) in ROOMS:
            allowed = GROUND | ROOMS[room] | {room}
            found = sorted(name for name in imports_of(module) if room_of(name) not in allowed)
            wrong += [f"{module} may import from {sorted(allowed)}, not {found}"] * bool(found)
    assert not wrong, "\n".join(wrong)


def test_every_room_is_drawn_and_no_two_import_each_other() -> None:
    assert {room_of(module) for module in MODULES} == {*ROOMS, *GROUND}
    TopologicalSorter({**ROOMS, **{name: {"errors"} - {name} for name in GROUND}}).prepare()


def test_no_files_import_each_other_in_a_circle() -> None:
    TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()  # its CycleError names the files


def test_packages_beside_gpipe_cli_import_relatively() -> None:
    """A user's own models.py or data/ must never be taken for ours, nor ours for theirs."""
    for module in (name for name in MODULES if room_of(name) in SIDE_BY_SIDE):
        for node in ast.walk(tree_of(module)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & {*SIDE_BY_SIDE, "gpipe_cli"}, module


def test_the_package_list_is_the_tree() -> None:
    folders = {path.parent for path in (ROOT / "gpipe_cli").rglob("__init__.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    for name in (*SIDE_BY_SIDE, TABLES):
        inside = [path.parent for path in (ROOT / name).rglob("__init__.py")]
        packages |= {".".join(["gpipe_cli", *folder.relative_to(ROOT).parts]) for folder in inside}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel; returns its path."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*build, str(copy_of_clone(folder / "clone"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def copy_of_clone(target: Path) -> Path:
    """Copies the files that a build reads, so that the build leaves nothing in the clone."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("gpipe_cli", *SIDE_BY_SIDE, TABLES):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target / name)
    return target


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_every_yaml(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    data = {f"gpipe_cli/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    own = {
        str(path.relative_to(ROOT)) for path in (ROOT / "gpipe_cli").rglob("*.*") if path.suffix in (".html", ".yaml")
    }
    names = (module.replace(".", "/") for module in MODULES if MODULES[module].name != "__init__.py")
    assert {*data, *own, *(f"gpipe_cli/{name}.py" for name in names)} <= held


@pytest.mark.slow
def test_the_wheel_installs_and_trains_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    """In an environment without the clone, from a folder whose own data/ and models.py would be found first."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    site, python = next(environment.glob("lib/python*/site-packages")), str(environment / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    (site / "dependencies.pth").write_text(f"{next(p for p in sys.path if p.endswith('site-packages'))}\n")
    folder = tmp_path / "elsewhere"
    (folder / "data").mkdir(parents=True)
    for trap in ("models.py", "conf.py", "data/__init__.py"):
        (folder / trap).write_text("raise ImportError('this is not ours')\n")
    outside = {**os.environ, "PYTHONPATH": str(folder)}
    where = [python, "-c", "import gpipe_cli.models as m, gpipe_cli.data as d; print(m.__file__, d.__file__)"]
    found = subprocess.run(where, cwd=folder, env=outside, capture_output=True, text=True)
    assert found.stdout.split() == [str(site / "gpipe_cli" / name / "__init__.py") for name in ("models", "data")]
    words = ["debug=tiny", "trainer.steps=2", "task.generation=null", "pipeline.K=2", "pipeline.workers=2"]
    command = [str(environment / "bin" / "gpipe-train"), *words, "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 2
