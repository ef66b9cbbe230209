"""The two ends of a Transformer: token embeddings with sinusoidal positions, and the projection to the vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LONGEST_WAVE = 10_000.0  # of the sinusoidal positions (Vaswani et al. 2017, section 3.5)


class TokenEmbedding(nn.Module):
    """√d times the token's vector, plus its position, then dropout.

    The vectors are drawn from N(0, 1/√d) (standard deviation d^-½), so what leaves has about unit variance.

    Args:
        vocabulary: number of tokens.
        d_model: width d; even.
        dropout: of the sum.
    """

    frequencies: Tensor

    def __init__(self, vocabulary: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.scale = math.sqrt(d_model)
        self.weight = nn.Parameter(torch.empty(vocabulary, d_model))
        nn.init.normal_(self.weight, std=d_model**-0.5)
        frequencies = torch.exp(torch.arange(0, d_model, 2) * (-math.log(LONGEST_WAVE) / d_model))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def embed(self, ids: Tensor, first_position: int = 0) -> Tensor:
        """Ids [b, t] of the positions from `first_position` on, to [b, t, d]."""
        vectors = F.embedding(ids, self.weight)
        places = torch.arange(
            first_position, first_position + ids.shape[1], dtype=self.frequencies.dtype, device=ids.device
        )
        angles = torch.outer(places, self.frequencies)
        waves = torch.cat((angles.sin(), angles.cos()), 1)
        return F.dropout(torch.add(waves, vectors, alpha=self.scale), self.dropout, self.training)


class VocabularyProjection(nn.Linear):
    """Logits [b, t, V] of y [b, t, d]: an untied matrix drawn from N(0, d^-½), with a bias of zeros.

    The softmax itself is part of the loss.
    """

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        nn.init.zeros_(self.bias)
