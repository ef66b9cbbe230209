"""Passes values between workers as JSON. What comes over a process group is never unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from ..config import MESSAGE_TAGS
from .tree import Tree

VALUES = MESSAGE_TAGS + 1  # message tag, beyond that of the exchange


def all_gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns every worker's ``value`` on all workers, in the group's order, as JSON keeps it: tuples become lists.

    Args:
        group: for CPU tensors; None when there is only one worker.

    Raises:
        ValueError: what arrives is no JSON.
    """
    tree = Tree(group, VALUES)
    return _list_of(tree.spread(tree.gather(_to_bytes(value))))


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns on rank 0 what `all_gather_json` does; an empty list elsewhere."""
    tree = Tree(group, VALUES)
    everyone = tree.gather(_to_bytes(value))
    return _list_of(everyone) if tree.parent is None else []


def broadcast_json(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Returns rank 0's ``value`` on all workers; arguments and errors as of `all_gather_json`."""
    return json.loads(Tree(group, VALUES).spread(_to_bytes(value)))


def _to_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def _list_of(content: bytes) -> list[Any]:
    values: list[Any] = json.loads(b"[%b]" % content)
    return values
