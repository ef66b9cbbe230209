"""Defines the usual blocks as people write them by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.traced.as_written.given import LENGTH, VOCABULARY, WIDTH, given, images, series, tokens, vectors
from benchmarks.traced.as_written.weights import Net


class Lambda(nn.Module):
    """Wraps a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@given(images)
class LambdaLayers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3),
            Lambda(lambda x: x * torch.sigmoid(x)),
            Lambda(lambda x: x.mean((2, 3))),
            nn.Linear(8, 8),
            Lambda(torch.tanh),
            nn.Linear(8, 10),
        )


@given(images)
class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(3, 8, 3), nn.Linear(8, 2), nn.Linear(2, 8)
        self.depth = nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Any:
        x = F.silu(self.conv(x))
        gate = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3)))))).unsqueeze(-1).unsqueeze(-1)
        return self.head(F.adaptive_avg_pool2d(self.depth(x * gate), 1).flatten(1))


@given(images)
class RelativePositions(nn.Module):
    """Computes window attention with a table of biases, looked up by a buffer of indices, as Swin does."""

    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.table = nn.Parameter(torch.zeros(9, 2))
        nn.init.trunc_normal_(self.table, std=0.02)
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        between = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + 1
        self.register_buffer("index", between[..., 0] * 3 + between[..., 1])

    def forward(self, x: Tensor) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, 2, -1).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(t, t, 2).permute(2, 0, 1)
        mixed = ((q @ k.transpose(-2, -1)) / 2 + bias).softmax(-1) @ v
        return self.head((x + self.out(mixed.transpose(1, 2).reshape(b, t, -1))).mean(1))


@given(tokens)
class RotaryDecoder(nn.Module):
    """Makes a small language model: rotary positions computed in forward, gated feed-forward layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out, self.gate = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 16, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def rotated(self, x: Tensor) -> Tensor:
        rates = 1 / 100 ** (torch.arange(0, x.shape[-1], 2, device=x.device).float() / x.shape[-1])
        angles = torch.outer(torch.arange(x.shape[-2], device=x.device), rates)
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, -1))
        h = self.norms[1](x)
        return self.head(x + self.down(F.silu(self.gate(h)) * self.up(h)))


@given(series)
class SparseMixture(nn.Module):
    """Gives each expert the tokens that are routed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 10)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Any:
        rows = x.reshape(-1, WIDTH)
        best = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (best.indices == number).nonzero().squeeze(-1)
            out.index_add_(0, mine, expert(rows[mine]) * best.values[mine, None])
        return self.head(out.view_as(x))


@given(vectors)
class Gated(Net):
    """Gates residual branches by scalars that start at zero, as ReZero does."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.tensor(0.5))

    def middle(self, h: Tensor) -> Any:
        h = h + self.alpha * self.body(h).tanh()
        return h + self.beta.sigmoid() * self.last(h).tanh()


@given(series)
class RecurrentTagger(nn.Module):
    """Runs a bidirectional LSTM of two layers and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.gru, self.head = nn.GRU(2 * WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.gru(self.lstm(x)[0])[1][-1])


@given(series)
class UnrolledCell(nn.Module):
    """Unrolls a recurrent cell in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.start = nn.GRUCell(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        h, states = self.start.expand(len(x), -1), []
        for step in x.unbind(1):
            h = self.cell(step, h)
            states.append(h)
        return self.head(torch.stack(states, 1))


@given(series)
class PackedRecurrence(nn.Module):
    """Packs sequences by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        lengths = torch.full((len(x),), LENGTH - 1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][-1])


@given(vectors, output="heads.classes")
class ManyHeads(Net):
    """Returns a dict of dicts; its heads lie in a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"classes": nn.Linear(WIDTH, 10), "more": nn.Linear(WIDTH, 10)})

    def forward(self, x: Tensor) -> Any:
        h = self.middle(self.stem(x))
        answers = {name: head(h) for name, head in self.heads.items()}
        answers["classes"] = sum(answers.values()) / len(answers)
        return {"heads": answers, "features": h}


@dataclass
class Parts:
    """Holds what `NestedAnswer` returns."""

    loss: Tensor | None
    scores: tuple[Tensor, tuple[Tensor, ...]]


@given(vectors, output="scores.1.0")
class NestedAnswer(Net):
    """Returns a dataclass with nested tuples."""

    def forward(self, x: Tensor) -> Any:
        h = self.stem(x)
        return Parts(None, (h, (self.head(self.middle(h)), h)))


@given(series)
class LibraryAttention(nn.Module):
    """Uses nn.MultiheadAttention with a mask, and nn.TransformerEncoder, which has a fast path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        x = x + self.attention(x, x, x, attn_mask=causal, need_weights=True)[0]
        return self.head(self.encoder(x, mask=causal, is_causal=True).mean(1))


@given(tokens)
class PacksTokens(nn.Module):
    """Computes with the tokens that are no padding, and puts the results back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, ids: Tensor) -> Any:
        real = ids != 0
        h = self.embedding(ids)
        out = torch.zeros_like(h)
        out[real] = torch.tanh(self.inner(h[real]))
        return self.head(out)


@given(vectors)
class LogProbability(Net):
    """Returns densities of torch.distributions, which look at their arguments."""

    def middle(self, h: Tensor) -> Any:
        return torch.distributions.Normal(self.body(h), F.softplus(self.last(h))).log_prob(h)  # type: ignore[no-untyped-call]


@given(vectors)
class AuxiliaryInTraining(Net):
    """Returns a second output in training only."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return (out, self.head(x)) if self.training else out


@given(series)
class SparseAdjacency(nn.Module):
    """Mixes nodes of a graph by a sparse matrix."""

    adjacency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.register_buffer("adjacency", (torch.rand(LENGTH, LENGTH) > 0.5).float().to_sparse())

    def forward(self, x: Tensor) -> Any:
        h = torch.sparse.mm(self.adjacency, self.inner(x).transpose(0, 1).flatten(1)).view(LENGTH, -1, WIDTH)
        return self.head(h.transpose(0, 1))
