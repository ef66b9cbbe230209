"""Tests that the host never waits for the device within a step, and batches are copied to it ahead of need."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from inline_run import train_inline
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_cli.pipeline.engine import Engine
from gpipe_cli.trainer.upload import Uploader

aten = torch.ops.aten
WAITS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default)
METHODS = (Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__)


class Waits(TorchDispatchMode):
    """Counts operations whose result depends on values, so that the host has to wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is aten.index.Tensor and any(i is not None and i.dtype is torch.bool for i in args[1])
        if func in WAITS or by_mask:
            self.counts[str(func)] += 1
        return func(*args, **kwargs or {})


class Methods(TorchFunctionMode):
    """Counts methods that copy values to the host; on a CPU they need no operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            self.counts[func.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("counter", [Waits, Methods])
@pytest.mark.parametrize("value", ["item", "mask", "bool", "float"])
def test_the_counters_see_what_waits(counter: Any, value: str) -> None:
    tensor, seen = torch.ones(2), 0
    with counter() as counts:
        {"item": tensor[0].item, "mask": lambda: tensor[tensor > 0], "bool": lambda: bool(tensor[0] > 0)}.get(
            value, lambda: float(tensor[0])
        )()
    seen = sum(counts.counts.values())
    assert seen == 1 or (counter is Methods and value == "mask" and seen == 0)


TRANSFORMER = ("task.generation=null", "task.logit_clip=null", "model.dropout=0.1")  # clipping looks, on a CPU alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (*TRANSFORMER, "precision=bf16", "precision.boundaries=bfloat16"),
        (*TRANSFORMER, "pipeline.schedule=zero_bubble", "pipeline.remat=never"),
        ("model=amoebanet", "pipeline.schedule=1f1b"),
        ("model=transformer_lm_small", "task.logit_clip=null"),
    ],
    ids=lambda words: " ".join(words[-2:]),
)
def test_the_host_does_not_wait_for_the_device_within_a_step(words: tuple[str, ...], tmp_path: Path) -> None:
    found: list[Counter[str]] = []
    train_step = Engine.train_step

    def counted(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        first = not found  # the first step looks at what it finds, such as buffers
        with nullcontext(Waits()) if first else Waits() as waits, Methods() as methods:
            record = train_step(engine, *args, **kwargs)
        found.append(Counter() if first else waits.counts + methods.counts)
        return record

    with patch.object(Engine, "train_step", counted):
        steps = ("trainer.steps=2", "trainer.evaluate_every=null", "trainer.evaluate_first=false")
        train_inline(tmp_path, "debug=tiny", *steps, "pipeline.K=3", "checkpoint.every=null", *words)
    assert found == [Counter(), Counter()]


def test_on_a_cpu_a_batch_stays_where_it_is() -> None:
    uploader, batch = Uploader(torch.device("cpu")), [((torch.ones(2),), (torch.zeros(2),))]
    taken = uploader.begin(batch)
    uploader.take(taken)
    assert taken[0][0][0] is batch[0][0][0]
