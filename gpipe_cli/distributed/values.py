"""Passes values between workers as JSON. What comes over a process group is never unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns every worker's ``value`` on all workers, in the group's order, as JSON keeps it: tuples become lists.

    Args:
        group: for CPU tensors; None when there is only one worker.

    Raises:
        ValueError: what arrives is no JSON.
    """
    content = _to_bytes(value)
    if group is None:
        return [_from_bytes(content)]
    sizes = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(content)]), group=group)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: len(content)] = content
    everyone = torch.empty(group.size() * len(padded), dtype=torch.uint8)
    dist.all_gather_into_tensor(everyone, padded, group=group)
    return [_from_bytes(row[:size]) for row, size in zip(everyone.view(group.size(), -1), sizes.tolist(), strict=True)]


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())
