"""Tests that nothing in the package unpickles: a pickle that comes from elsewhere runs code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from test_packaging import MODULES

SUSPECT = re.compile(r"(?i)pickle|dill|joblib|marshal|shelve|_object|torch\.load")  # others need not be parsed
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def faults(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if alias.name.partition(".")[0] in PICKLING)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLING:
            yield f"from {node.module} import"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            if name.endswith(("_object", "_object_list")) and name.startswith(("dist.", "distributed.", "torch.")):
                yield name
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name == "torch.load" and keywords.get("weights_only") != "True":
                yield f"{name} without weights_only=True"
            if keywords.get("allow_pickle", "False") != "False":
                yield f"{name} with allow_pickle"


def test_nothing_is_unpickled() -> None:
    texts = {module: path.read_text(encoding="utf-8") for module, path in MODULES.items()}
    suspects = {module: ast.parse(text) for module, text in texts.items() if SUSPECT.search(text)}
    assert [f"{module}: {fault}" for module, tree in suspects.items() for fault in faults(tree)] == []


def test_each_way_to_unpickle_is_found() -> None:
    imports = "import pickle", "from dill import loads"
    calls = "dist.gather_object(a, b)", "torch.load(f)", "np.load(f, allow_pickle=True)"
    ways = imports + calls
    assert [len(list(faults(ast.parse(way)))) for way in ways] == [1] * len(ways)
    assert all(SUSPECT.search(way) for way in (*ways, *PICKLING))
