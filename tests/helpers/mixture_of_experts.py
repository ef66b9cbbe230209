"""Defines a model whose layers look at values: a mixture of experts, and layers that work on some rows only."""

from __future__ import annotations

from functools import partial

import torch
from own_model import Flatten
from torch import Tensor, nn

from gpipe_cli.layers import LayerBuilder

Rows = tuple[Tensor, Tensor, Tensor]  # the chosen rows, which rows they are, and all rows


class Experts(nn.Module):
    """Sends each row to one expert."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * gates[rows, None])
        return x + out


class Choose(nn.Module):
    def forward(self, x: Tensor) -> Rows:
        chosen = x.sum(-1) > 0
        return x[chosen], chosen, x


class Change(nn.Linear):
    def forward(self, given: Rows) -> Rows:  # type: ignore[override]  # takes rows
        rows, chosen, x = given
        return super().forward(rows).relu(), chosen, x


class PutBack(nn.Module):
    def forward(self, given: Rows) -> Tensor:
        rows, chosen, x = given
        out = x.clone()
        out[chosen] = rows
        return out


def layers(width: int = 8) -> list[LayerBuilder]:
    """Returns eight layers; behind `choose` and `change` the shapes depend on values."""
    return [
        LayerBuilder("flatten", Flatten),
        LayerBuilder("first", partial(nn.Linear, 192, width)),
        LayerBuilder("experts_0", partial(Experts, width, 3)),
        LayerBuilder("experts_1", partial(Experts, width, 3)),
        LayerBuilder("choose", Choose),
        LayerBuilder("change", partial(Change, width, width)),
        LayerBuilder("put_back", PutBack),
        LayerBuilder("last", partial(nn.Linear, width, 10)),
    ]
