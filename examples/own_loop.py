"""Trains a list of layers with a loop of one's own: `torchrun --nproc-per-node 2 own_loop.py`."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_cli import LayerBuilder, Pipeline

SIZE, STEPS = 128, 8  # of a mini-batch; number of steps


class Block(nn.Module):
    """Adds to its input a two-layer perceptron of the normalised input, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.1))
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x))


def layers(width: int = 32) -> list[LayerBuilder]:
    """Returns the model; each process builds its own part of it alone."""
    blocks = [LayerBuilder(f"block_{number}", partial(Block, width)) for number in range(4)]
    return [
        LayerBuilder("first", partial(nn.Linear, 2, width)),
        *blocks,
        LayerBuilder("last", partial(nn.Linear, width, 2)),
    ]


def mini_batch(number: int) -> tuple[Tensor, Tensor]:
    """Returns points of the plane, and on which of two spirals each lies."""
    random = torch.Generator().manual_seed(number)
    turn, side = torch.rand(SIZE, generator=random) * 9, torch.randint(0, 2, (SIZE,), generator=random)
    angle = turn + torch.pi * side
    return torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 9, side


def main() -> None:
    pipeline = Pipeline.of(layers(), F.cross_entropy, mini_batch(0), K=2, M=4, schedule="1f1b", remat="always")
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.005)
    for number in range(STEPS):
        loss = pipeline.step(*mini_batch(number))  # adds to .grad, as backward() does
        optimizer.step()
        optimizer.zero_grad()
        if pipeline.world.rank == 0:
            print(f"step {number + 1}  loss {loss!r}")
    found = pipeline.forward(*mini_batch(STEPS))  # of each micro-batch, where the last layer is
    if found:
        right = sum(int((outputs[0].argmax(1) == targets[0]).sum()) for outputs, targets in found)
        print(f"{right} of {SIZE} are right")


if __name__ == "__main__":
    main()
