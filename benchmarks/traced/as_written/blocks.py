"""Defines the usual blocks as people write them by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.traced.as_written.given import WIDTH, given, series


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
