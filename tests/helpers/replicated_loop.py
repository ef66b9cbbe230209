"""Trains two steps with replicas in a loop of one's own, saves, and prints losses and a digest of what it has."""

import sys
from functools import partial

import torch
from torch import Tensor, nn

from gpipe_cli import LayerBuilder, Pipeline

X, Y = torch.linspace(-1, 1, 48).sin().view(16, 3), torch.linspace(-1, 1, 48).cos().view(16, 3)


class LastLinear(nn.Linear):
    """Divides by the steps that it has been told; has a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.unused, self.steps = nn.Parameter(torch.ones(2)), 1

    def begin_step(self, step: int, steps: int) -> None:
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.steps


def layers() -> list[LayerBuilder]:
    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    return [
        LayerBuilder("first", lambda: first),
        LayerBuilder("norm", partial(nn.BatchNorm1d, 3)),
        LayerBuilder("again", lambda: first),
        LayerBuilder("linear", partial(nn.Linear, 3, 3)),
        LayerBuilder("last", LastLinear),
    ]


def trained(replicas: int, K: int, folder: str) -> tuple[Pipeline, list[float]]:
    """Returns the pipeline after two updates, each from two steps, and the losses of the steps."""
    mse = nn.functional.mse_loss
    pipeline = Pipeline.of(layers(), mse, (X[:2], Y[:2]), K=K, M=8 // replicas, replicas=replicas, steps=4)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
    part = slice(pipeline.world.replica * 16 // replicas, (pipeline.world.replica + 1) * 16 // replicas)
    losses = []
    for _ in range(2):
        losses += [pipeline.step(X[part], Y[part]), pipeline.step(2 * X[part], Y[part])]
        losses.append(pipeline.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
    pipeline.save(folder, optimizer)
    return pipeline, losses


if __name__ == "__main__":
    if "joined" in sys.argv:  # the program has a process group, as `group` or a part of it
        torch.distributed.init_process_group("gloo")
    made, found = trained(2, int(sys.argv[1]), sys.argv[2])
    if made.world.rank == 0:
        print("losses", *found)
    made.close()
    made.close()
