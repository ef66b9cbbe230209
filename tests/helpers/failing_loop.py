"""Runs loops whose steps fail in one worker, under torchrun or alone; a loop goes on with the bits of one without."""

import os
import signal
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe_cli import LayerBuilder, Pipeline
from gpipe_cli.pipeline.messages import transport

X, Y = torch.linspace(-1, 1, 16).view(8, 2), torch.zeros(8, 2)
PLACES = ("a forward", "b forward", "a backward", "b backward", "a evaluation", "b evaluation", "b waits", "lengths")


class Fails(torch.autograd.Function):
    """Fails in backward where the name says so; the name of its attribute is also that of a method of its node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        fail_at(f"{ctx.name} backward")
        return gradients[0], None


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.fc, self.norm, self.drop, self.name = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.3), name

    def forward(self, x: Tensor) -> Tensor:
        fail_at(f"{'b' if self.name == 'a' else 'nobody'} waits")
        y: Tensor = Fails.apply(self.drop(self.norm(self.fc(x))), self.name)
        fail_at(f"{self.name} {'forward' if self.training else 'evaluation'}")
        return y


failing, countdown, pid_of_b = "", 0, os.getpid()
CLASSES: dict[str, type[BaseException]] = {"lengths": ValueError, "b waits": KeyboardInterrupt, "b backward": KeyError}


def fail_at(place: str) -> None:
    global countdown
    countdown -= place == failing
    if place == failing and countdown == 0:
        if place != "b waits":
            raise CLASSES.get(place, torch.OutOfMemoryError)(f"no memory in {place}")
        os.kill(pid_of_b, signal.SIGINT)  # Ctrl-C, while a computes


def ends_of(kind: str, failures: tuple[str, ...], number: int = 1, **others: Any) -> tuple[dict[str, Any], list[Any]]:
    """Returns what a loop of three steps, after the first of which calls fail, leaves, and the exceptions.

    Args:
        number: number of the call at that place that fails.
    """
    global failing, countdown
    layers = [LayerBuilder(name, partial(Layer, name)) for name in "ab"]
    others |= {"K": 2, "M": 4, "schedule": kind, "partition": [1, 1]}
    pipeline = Pipeline.of(layers, nn.functional.mse_loss, (X[:2], Y[:2]), **others)
    caught: list[BaseException] = []
    for failing in failures[:1]:  # before any shape is known to the next worker
        countdown = number
        caught += attempt(pipeline, failing)
    failing = ""
    losses = [pipeline.step(X, Y)]
    random = torch.get_rng_state()
    for failing in failures:
        countdown = number
        caught += attempt(pipeline, failing)
    failing = ""
    assert torch.equal(torch.get_rng_state(), random)
    losses += [pipeline.step(X, Y), pipeline.step(X, Y)]  # gradients of three steps add up
    state = {**pipeline.state_dict(), **{str(i): p.grad for i, p in enumerate(pipeline.parameters())}}
    return {"losses": losses, **{name: value.tolist() for name, value in state.items()}}, caught


def attempt(pipeline: Pipeline, place: str) -> list[BaseException]:
    try:
        if place.endswith("evaluation"):
            pipeline.forward(X, Y)
        else:
            pipeline.step(X, Y[:7] if place == "lengths" else Y)
    except (Exception, KeyboardInterrupt) as error:
        return [error]
    return []


def main() -> None:
    """Prints one line for each case, as a worker of torchrun."""
    global pid_of_b
    packed = transport.pack

    def pack(*arguments: Any) -> Tensor:
        fail_at(f"{'ab'[dist.get_rank()]} packs")
        return packed(*arguments)

    transport.pack = pack
    for kind in ("gpipe", "zero_bubble"):
        right, _ = ends_of(kind, ())  # makes the default group; each later one joins it
        rank, pids = dist.get_rank(), torch.tensor([0, os.getpid()])
        dist.broadcast(pids, 1)
        pid_of_b = int(pids[1])
        for place in (*PLACES, "a packs", "b packs"):
            found, caught = ends_of(kind, (place,), 1 + (kind == "gpipe"))
            its = sum(isinstance(error, CLASSES.get(place, torch.OutOfMemoryError)) for error in caught)
            print(f"rank {rank}, {kind}, {place}: {found == right}, {its} caught, {str(caught[0])[:200]}\n", end="")
    groups = [dist.new_group([number]) for number in range(2)]
    both = dist.new_group([0, 1])  # before, as torch's names of groups count those of a part on its members alone
    found = ends_of("gpipe", (), group=groups[0])[0] if rank == 0 else {}
    dist.barrier(both)
    print(f"rank {rank}, alone: {len(found)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
