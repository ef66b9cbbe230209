"""Defines modules whose later calls, or calls with other inputs, a trace of one call would not repeat."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from unusual_modules import WIDTH, Perceptron


class TogglesMode(Perceptron):
    """Leaves what its forward has set until the mode changes."""

    def changed(self, h: Tensor) -> Tensor:
        h = F.dropout(super().changed(h), training=self.second.training)
        self.second.eval()
        return h


class DrawsTable(Perceptron):
    table: Tensor | None = None

    def changed(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.randn(WIDTH, WIDTH)
        return super().changed(h) @ self.table


class Padded(Perceptron):
    """Counts padding in a mean, on which torch's encoder puts zeros in evaluation alone."""

    def add_parts(self) -> None:
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True), 2)

    def changed(self, h: Tensor) -> Tensor:
        texts, padding = torch.stack([h, -h, h * h], 1), torch.arange(3).expand(h.shape[0], 3) > 1
        return self.second(self.encoder(texts, src_key_padding_mask=padding).mean(1))


class OneAlone(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        return super().changed(h - h.mean(0) if h.shape[0] > 1 else h)


class OneToken(nn.Module):
    """Has another way for texts of one token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.head(self.table(ids))
        return h.mean(1) if ids.shape[1] > 1 else h.sin()[:, 0]


class AttendsBefore(Perceptron):
    """Masks by the smallest number of the type, as attention is often written."""

    def changed(self, h: Tensor) -> Tensor:
        dots = self.second(h) @ self.third.weight
        mask = torch.ones(WIDTH, dtype=torch.bool).cumsum(0) > 2
        return dots.masked_fill(mask, -torch.finfo(dots.dtype).max).softmax(1).to(h.dtype) * 9


class AsksForType(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        h = super().changed(h)
        return h if h.dtype == torch.float32 else 3 * h


class TiedHalf(Perceptron):
    """Is all bfloat16, with one matrix in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def add_parts(self) -> None:
        self.second.weight = self.third.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.head.weight.dtype))

    def changed(self, h: Tensor) -> Tensor:
        return super().changed(F.linear(h, self.third.weight))
