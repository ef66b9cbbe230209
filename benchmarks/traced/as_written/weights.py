"""Defines modules that hold, share, tie, freeze or make weights in ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.traced.as_written.given import VOCABULARY, WIDTH, given, series, tokens, vectors


class Net(nn.Module):
    """Stacks four layers; most modules below change what happens between the first and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.gelu(self.last(self.middle(F.gelu(self.stem(x))))))

    def middle(self, h: Tensor) -> Any:
        return F.gelu(self.body(h))


@given(tokens)
class TiedInList(nn.Module):
    """Keeps tied weights in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.tied = [self.embedding.weight]

    def forward(self, ids: Tensor) -> Any:
        h = self.embedding(ids)
        h = h + torch.tanh(self.mix(h.cumsum(1)))
        return F.linear(self.norm(h), self.tied[0])


@given(vectors)
class WeightInClosure(Net):
    """Keeps a function that closes over a weight."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.body.weight

        def back(h: Tensor) -> Tensor:
            return h @ weight

        self.back: Callable[[Tensor], Tensor] = back

    def middle(self, h: Tensor) -> Any:
        return self.back(F.gelu(self.body(h)))


@given(vectors)
class HiddenParameter(Net):
    """Hides a weight by object.__setattr__."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "kernel", self.stem.weight)

    def middle(self, h: Tensor) -> Any:
        return self.body(h) + F.linear(h, self.kernel)  # type: ignore[arg-type]


@given(vectors)
class KeepsTranspose(nn.Module):
    """Decodes by the encoder's weight, transposed once in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.head = nn.Linear(WIDTH, 5), nn.Linear(5, 5), nn.Linear(WIDTH, 10)
        self.decoder_weight = self.encoder.weight.t()

    def forward(self, x: Tensor) -> Any:
        return self.head(F.linear(self.middle(torch.sigmoid(self.encoder(x))), self.decoder_weight))


@given(vectors)
class KeepsData(Net):
    """Keeps `.data` of a weight, which the optimizer goes on changing."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = self.stem.weight.data

    def middle(self, h: Tensor) -> Any:
        return self.last(self.body(h)) + h @ self.anchor


@given(series)
class Siamese(nn.Module):
    """Calls one encoder for both of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(2 * WIDTH, 10)

    def forward(self, pair: Tensor) -> Any:
        one, other = self.encoder(pair[:, 0]), self.encoder(pair[:, 1])
        return self.head(torch.cat([(one - other).abs(), one * other], -1))


@given(series)
class Looped(nn.Module):
    """Repeats one Transformer layer, as a universal Transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        for _ in range(4):
            x = self.block(x)
        return self.head(x.mean(1))


@given(vectors)
class SpectralNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.body)


@given(vectors)
class Lazy(Net):
    """Creates parameters at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LazyLinear(WIDTH)


@given(vectors)
class FreezesInTrain(Net):
    """Freezes weights in an overridden train()."""

    def train(self, mode: bool = True) -> FreezesInTrain:
        super().train(mode)
        self.stem.requires_grad_(False)
        return self


@given(vectors)
class FreezesInForward(Net):
    """Freezes a layer in forward."""

    def middle(self, h: Tensor) -> Any:
        self.body.requires_grad_(False)
        return F.gelu(self.body(h))


@given(vectors)
class ClipsData(Net):
    """Clips a weight in forward, as a critic of Wasserstein GANs does."""

    def middle(self, h: Tensor) -> Any:
        self.body.weight.data.clamp_(-0.1, 0.1)
        return F.gelu(self.body(h))


@given(vectors)
class TiedByData(Net):
    """Makes two weights share their values by .data."""

    def __init__(self) -> None:
        super().__init__()
        self.body.weight.data = self.stem.weight.data


@given(vectors)
class MasksGradient(Net):
    """Keeps zeros in a weight by a hook on its gradient."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.rand(WIDTH, WIDTH) > 0.5
        self.body.weight.register_hook(lambda gradient: gradient * mask)  # type: ignore[no-untyped-call]


@given(vectors)
class MergesForEvaluation(Net):
    """Adds a low-rank update to the weight itself when it is put into evaluation mode, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.merged = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1), False

    def train(self, mode: bool = True) -> MergesForEvaluation:
        super().train(mode)
        if mode == self.merged:
            self.body.weight.data += -self.low.data if mode else self.low.data
            self.merged = not mode
        return self

    def middle(self, h: Tensor) -> Any:
        return self.body(h) if self.merged else F.linear(h, self.body.weight + self.low)
