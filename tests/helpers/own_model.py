"""Defines a user's own model, in which some steps take no time: digits of 8×8 pixels, two linear maps."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gpipe_cli.data.images.digits import DigitsSource
from gpipe_cli.data.source import Batch
from gpipe_cli.layers import LayerBuilder

DIGITS = ("data=digits", "data.image_size=8", "data.batch_size=16", "task=classification", "lr_schedule=constant")
WORDS = (*DIGITS, "model._target_=own_model.layers", "trainer.evaluate_first=false", "trainer.evaluate_every=null")


def layers(middle: str = "ReLU") -> list[LayerBuilder]:
    """Returns two linear maps with `middle`, a class of this module or of torch.nn, between them."""
    return [
        LayerBuilder("flatten", Flatten),
        LayerBuilder("first", partial(nn.Linear, 192, 8)),
        LayerBuilder("middle", globals().get(middle) or getattr(nn, middle)),
        LayerBuilder("last", partial(nn.Linear, 8, 10)),
    ]


def with_a_frozen_start() -> list[LayerBuilder]:
    """Returns a model of 1,634 parameters, of which the first map's 1,544 are frozen."""
    flatten, _, *others = layers()
    return [flatten, LayerBuilder("first", lambda: nn.Linear(192, 8).requires_grad_(False)), *others]


def with_a_layer_twice() -> list[LayerBuilder]:
    """Returns a model of 1,706 parameters, of which two layers share 72."""
    both = nn.Linear(8, 8)
    first, last = layers()[:2], layers()[-1]
    return [*first, LayerBuilder("once", lambda: both), LayerBuilder("again", lambda: nn.Sequential(both)), last]


def with_ties(kind: str = "declared") -> list[LayerBuilder]:
    """Returns five layers, of which the second, the fourth and the last use one matrix of 1,920 numbers.

    Args:
        kind: how they say so: "declared", "shared", both as a "frozen" one; "untied": each has its own.
    """
    tied = {"weight": "first.weight"} if kind in ("declared", "frozen") else {}
    first: Callable[[], nn.Module] = partial(_without_bias, kind == "frozen")
    back: Callable[[], nn.Module] = partial(Back, kind == "frozen")
    if kind == "shared":
        one, other = first(), back()
        other.weight = one.weight
        first, back = lambda: one, lambda: other
    return [
        LayerBuilder("flatten", Flatten),
        LayerBuilder("first", first),
        LayerBuilder("middle", partial(nn.Linear, 10, 10)),
        LayerBuilder("back", back, tied=tied),
        LayerBuilder("last", first, tied=tied),
    ]


def _without_bias(frozen: bool) -> nn.Module:
    return nn.Linear(192, 10, bias=False).requires_grad_(not frozen)


class Back(nn.Module):
    """Multiplies by the transposed matrix of a linear map, and bends."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 192) / 10, not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Flatten(nn.Module):
    """Maps uint8 [b, 3, 8, 8] to float32 [b, 192], from 0 to 1."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) / 255


class Idle(nn.Module):
    """Adds a branch in micro-batches with an even first label, and never uses another."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x) if int(x[0, 0] * 1000) % 2 else x


def cut_off() -> list[LayerBuilder]:
    """Returns a model whose head looks at the layers before it without a gradient for them."""
    *trunk, last = layers("Idle")
    return [*trunk, LayerBuilder("cut", Detached), last]


class Detached(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


class Fading(nn.Module):
    """Goes by how much of the run has passed."""

    share = 0.0

    def begin_step(self, step: int, steps: int) -> None:
        self.share = step / max(1, steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 - self.share)


class Stepping(nn.Module):
    """Knows the number of the step, and passes its input on; a run with it is resumed with any number of steps."""

    depends_on_steps = False
    step = 0

    def begin_step(self, step: int, steps: int) -> None:
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Counting(Stepping):
    """Goes by the number of the step alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 - 1 / (self.step + 2))


class Overflowing(Stepping):
    """Gives infinity in step 2."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0 if self.step == 1 and self.training else x


class Ending(Stepping):
    """Asks for an end of the run in the middle of step `at`."""

    at: ClassVar[int | None] = None
    asked: ClassVar[bool] = False

    def begin_step(self, step: int, steps: int) -> None:
        Ending.asked = step == self.at


def die(*_: object) -> None:
    """Ends this process as the environment says (HOW)."""
    print("the last line of the log", flush=True)
    if os.environ["HOW"] == "exit":
        os._exit(3)
    if os.environ["HOW"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["HOW"] == "crash":
        ctypes.string_at(0)


def in_backward(x: Tensor, act: Callable[[Tensor], Tensor | None]) -> Tensor:
    """Returns the same values; ``act`` is called with their gradient, and may return another one."""
    inner = x.clone()
    if inner.requires_grad:
        inner.register_hook(act)  # type: ignore[no-untyped-call]  # torch's own
    return inner.clone()


class Doomed(Stepping):
    """Dies in step 2 as the environment says (WHERE, HOW)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.step == 1 and os.environ["WHERE"] == "forward":
            die()
        return in_backward(x, die) if self.step == 1 and os.environ["WHERE"] == "backward" else x


class DoomedDigits(DigitsSource):
    """Dies while the third mini-batch is read."""

    def train(self, *arguments: Any) -> Iterator[Batch]:
        for number, batch in enumerate(super().train(*arguments)):
            if number == 2 and os.environ["WHERE"] == "data":
                die()
            yield batch


class Dying(Stepping):
    """Dies in the backward of the sixth step as the environment says (HOW), on the first start by torchrun."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dies = self.step == 5 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        return in_backward(x, die) if dies else x
