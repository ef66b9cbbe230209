"""Refuses YAML that has no end because of its aliases: a value that holds itself, or copies of copies of copies.

OmegaConf writes every alias out, so ten lines could take hours and all memory. Once this module is imported, the check
is part of PyYAML's safe loader in this process, by which Hydra reads its files too.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

MOST_COPIES = 10_000  # values that aliases may add to a file
_get_single_node = yaml.SafeLoader.get_single_node


def _checked(loader: Any) -> Any:
    root = _get_single_node(loader)
    sizes: dict[Any, int] = {}
    if root is not None and _size(root, set(), sizes) - len(sizes) > MOST_COPIES:
        _refuse(root, f"its aliases (*name) stand for more than {MOST_COPIES:,} values: write fewer of them")
    return root


def _size(node: Any, around: set[Any], sizes: dict[Any, int]) -> int:
    """Returns the number of values in a node with every alias written out."""
    if node in around:
        _refuse(node, "this value holds itself, by an alias (*name): take the alias out")
    if node not in sizes:
        around.add(node)
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = (part if isinstance(part, tuple) else (part,) for part in parts)  # key and value of a mapping
        sizes[node] = 1 + sum(_size(part, around, sizes) for part in chain.from_iterable(pairs))
        around.remove(node)
    return sizes[node]


def _refuse(node: Any, problem: str) -> None:
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


yaml.SafeLoader.get_single_node = _checked
