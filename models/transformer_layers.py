"""Defines the layers of the pre-layer-norm Transformers: embeddings, sub-layers x + dropout(f(LN(x))), projection.

Each sub-layer is a layer of the model's list (paper, section 5). `x` is the first tensor of the boundary; a sub-layer
passes the others on. Attention is 64·A wide, whatever the width d of the model is. All projections have biases.
`decode` is the forward pass of the next tokens alone; it keeps in `cache` what it needs of the earlier ones.
"""

# A module's call returns Any, as torch declares it:
# mypy: no-warn-return-any

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers import LayerBuilder

HEAD_WIDTH = 64  # the paper keeps it for every number of heads A
LONGEST_WAVE = 10_000.0  # of positions (Vaswani et al. 2017, section 3.5)

Positions = Literal["sinusoids", "rotary"]
"""How a model knows the order of tokens: sinusoids added to embeddings, or queries and keys turned (Su et al. 2021)."""

Boundary = Tensor | tuple[Tensor, ...]
Sublayers = Mapping[str, Callable[[], nn.Module]]


class Projection(nn.Linear):
    """Maps linearly, with a Xavier-uniform matrix and a bias of zeros.

    Args:
        inputs, outputs: widths.
        matrices: number of matrices that lie side by side in this one; each gets the bound that it would have alone.
        scale: multiplies the bound (depth-scaled initialisation).
    """

    def __init__(self, inputs: int, outputs: int, matrices: int = 1, scale: float = 1.0) -> None:
        self.matrices, self.scale = matrices, scale  # nn.Linear's constructor calls reset_parameters, which reads them
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        bound = self.scale * (6 / (self.in_features + self.out_features / self.matrices)) ** 0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)


class Sublayer(nn.Module):
    """Holds the parts that all sub-layers share: the norm before, dropout and the residual sum after."""

    graph_varies = False

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.dropout = dropout

    def add(self, x: Tensor, change: Tensor) -> Tensor:
        """Returns x + dropout(change)."""
        return x + F.dropout(change, self.dropout, self.training)


class FeedForward(Sublayer):
    """Computes x + dropout(d → H → ReLU → d), in the encoder, the decoder and the language model.

    Args:
        d_model, H: widths.
        dropout: probability in the residual branch.
        init_scale: multiplies the Xavier bound of both matrices. The paper (section 5) only says that it falls with the
            number of layers, after Fixup, whose rule for two matrices in a residual branch is layers^-½.
    """

    def __init__(self, d_model: int, H: int, dropout: float, init_scale: float = 1.0) -> None:
        super().__init__(d_model, dropout)
        self.hidden = Projection(d_model, H, scale=init_scale)
        self.output = Projection(H, d_model, scale=init_scale)

    def forward(self, inputs: Boundary) -> Boundary:
        x, *rest = (inputs,) if isinstance(inputs, Tensor) else inputs
        x = self.add(x, self.output(F.relu(self.hidden(self.norm(x)))))
        return (x, *rest) if rest else x


class Attention(Sublayer):
    """Holds the parts that the kinds of attention share: heads, scaled dot product, the projection after it."""

    def __init__(self, d_model: int, A: int, dropout: float, attention_dropout: float) -> None:
        super().__init__(d_model, dropout)
        self.heads = A
        self.attention_dropout = attention_dropout
        self.output = Projection(HEAD_WIDTH * A, d_model)

    def split_heads(self, x: Tensor, matrices: int) -> tuple[Tensor, ...]:
        """Returns [b, t, matrices·64A] as `matrices` views [b, A, t, 64]."""
        batch, length, _ = x.shape
        return tuple(one.transpose(1, 2) for one in x.view(batch, length, matrices, self.heads, HEAD_WIDTH).unbind(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        """Returns [b, t, d] for queries [b, A, t, 64], keys and values [b, A, s, 64]; False in `mask` hides a key."""
        probability = self.attention_dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(query, key, value, mask, probability, causal)
        batch, _, length, _ = heads.shape
        return self.output(heads.transpose(1, 2).reshape(batch, length, self.heads * HEAD_WIDTH))


class SelfAttention(Attention):
    """Makes queries, keys and values from one input.

    Args:
        d_model, A, dropout, attention_dropout: arguments of `Attention`.
        positions: "rotary" turns queries and keys by their positions.
    """

    frequencies: Tensor | None

    def __init__(
        self, d_model: int, A: int, dropout: float, attention_dropout: float, positions: Positions = "sinusoids"
    ) -> None:
        super().__init__(d_model, A, dropout, attention_dropout)
        self.query_key_value = Projection(d_model, 3 * HEAD_WIDTH * A, matrices=3)
        waves = frequencies_of(HEAD_WIDTH)
        signed = torch.cat((-waves, waves)) if positions == "rotary" else None
        self.register_buffer("frequencies", signed, persistent=False)

    def project(self, x: Tensor, first_position: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values [b, A, t, 64] of x [b, t, d], which stands at `first_position` and after."""
        projected = self.query_key_value(self.norm(x))
        if self.frequencies is None:
            query, key, value = self.split_heads(projected, 3)
            return query, key, value
        batch, length, _ = x.shape
        heads = projected.view(batch, length, 3, self.heads, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        both, (value,) = heads.split((2, 1))
        query, key = turned(both, phases(self.frequencies, first_position, length))
        return query, key, value


class EncoderAttention(SelfAttention):
    """Attends to the whole source: (x [b, S, d], source mask [b, 1, 1, S], …) to the same shapes."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, mask = inputs[:2]
        return self.add(x, self.attend(*self.project(x), mask)), *inputs[1:]

    def decode(self, inputs: tuple[Tensor, ...], cache: dict[str, Any]) -> tuple[Tensor, ...]:
        """Attends in a group of sentences' first call; later calls have an empty source and return their inputs."""
        return self.forward(inputs) if inputs[0].shape[1] else inputs


class CausalAttention(SelfAttention):
    """Attends to earlier targets: the decoder's (y [b, T, d], memory, source mask), or a language model's y alone.

    Padding stands on the right only, so the causal mask hides it from every real target.
    """

    def forward(self, inputs: Boundary) -> Boundary:
        y, *rest = (inputs,) if isinstance(inputs, Tensor) else inputs
        y = self.add(y, self.attend(*self.project(y), None, causal=True))
        return (y, *rest) if rest else y

    def decode(self, inputs: Boundary, cache: dict[str, Any]) -> Boundary:
        """Attends from the next tokens, y [b, t, d]; appends their keys and values to those in `cache`."""
        y, *rest = (inputs,) if isinstance(inputs, Tensor) else inputs
        query, key, value = self.project(y, cache["key"].shape[2] if "key" in cache else 0)
        if "key" in cache:
            key, value = torch.cat((cache["key"], key), 2), torch.cat((cache["value"], value), 2)
        cache["key"], cache["value"] = key, value
        new, total = query.shape[2], key.shape[2]
        mask = None if new == 1 else y.new_ones(new, total, dtype=torch.bool).tril(total - new)
        y = self.add(y, self.attend(query, key, value, mask))
        return (y, *rest) if rest else y


class CrossAttention(Attention):
    """Attends from the decoder to the source: (y [b, T, d], memory [b, S, d], source mask) to the same shapes."""

    def __init__(self, d_model: int, A: int, dropout: float, attention_dropout: float) -> None:
        super().__init__(d_model, A, dropout, attention_dropout)
        self.query = Projection(d_model, HEAD_WIDTH * A)
        self.key_value = Projection(d_model, 2 * HEAD_WIDTH * A, matrices=2)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        y, memory, mask = inputs
        key, value = self.split_heads(self.key_value(memory), 2)
        return self._attend_to(y, key, value, mask), memory, mask

    def decode(self, inputs: tuple[Tensor, Tensor, Tensor], cache: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Attends from the next tokens, y [b, t, d], to the source, whose keys, values and mask `cache` keeps.

        Memory has S > 0 in the first call for a group of sentences, which fills the cache, and S = 0 after it.
        """
        y, memory, mask = inputs
        if memory.shape[1]:
            cache["key"], cache["value"] = self.split_heads(self.key_value(memory), 2)
            cache["mask"] = mask
        return self._attend_to(y, cache["key"], cache["value"], cache["mask"]), memory, mask

    def _attend_to(self, y: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Returns y plus its attention to the source's keys and values."""
        (query,) = self.split_heads(self.query(self.norm(y)), 1)
        return self.add(y, self.attend(query, key, value, mask))


class TokenEmbedding(nn.Module):
    """Embeds tokens: √d times the token's vector, plus its sinusoidal position if there is one, then dropout.

    The vectors are drawn with standard deviation d^-½, so that the output has about unit variance.

    Args:
        vocabulary: number of tokens.
        d_model: width d; even.
        dropout: probability, applied to the sum.
        positions: "rotary" leaves them to the attention.
    """

    graph_varies = False
    frequencies: Tensor | None

    def __init__(self, vocabulary: int, d_model: int, dropout: float, positions: Positions = "sinusoids") -> None:
        super().__init__()
        self.dropout = dropout
        self.scale = math.sqrt(d_model)
        self.weight = nn.Parameter(torch.empty(vocabulary, d_model))
        nn.init.normal_(self.weight, std=d_model**-0.5)
        waves = frequencies_of(d_model) if positions == "sinusoids" else None
        self.register_buffer("frequencies", waves, persistent=False)

    def embed(self, ids: Tensor, first_position: int = 0) -> Tensor:
        """Returns vectors [b, t, d] of ids [b, t], the first of which stand at `first_position`."""
        vectors = F.embedding(ids, self.weight)
        if self.frequencies is None:
            return F.dropout(vectors * self.scale, self.dropout, self.training)
        angles = phases(self.frequencies, first_position, ids.shape[1])
        waves = torch.cat((angles.sin(), angles.cos()), 1)
        return F.dropout(torch.add(waves, vectors, alpha=self.scale), self.dropout, self.training)

    def embed_next(self, ids: Tensor, cache: dict[str, Any]) -> Tensor:
        """Returns the next tokens' vectors [b, t, d]; `cache` counts the tokens of earlier calls."""
        first = cache.get("length", 0)
        cache["length"] = first + ids.shape[1]
        return self.embed(ids, first)


class VocabularyProjection(nn.Linear):
    """Computes logits [b, t, V] from y [b, t, d]; the softmax itself is part of the loss.

    The matrix is drawn with standard deviation d^-½, the bias is zero.
    """

    graph_varies = False

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        nn.init.zeros_(self.bias)


def frequencies_of(width: int) -> Tensor:
    """Returns the frequencies [width / 2] of sinusoidal positions, highest first."""
    return torch.exp(torch.arange(0, width, 2) * (-math.log(LONGEST_WAVE) / width))


def phases(frequencies: Tensor, first_position: int, length: int) -> Tensor:
    """Returns the angles [length, width / 2] of positions from `first_position` on."""
    places = torch.arange(first_position, first_position + length, dtype=frequencies.dtype, device=frequencies.device)
    return torch.outer(places, frequencies)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + w/2]) of x [..., t, w] by an angle; returns the type of x.

    Args:
        angles: [t, w], of float32; the left half has the signs of the right half reversed.
    """
    return torch.addcmul(x * angles.cos(), x.roll(x.shape[-1] // 2, -1), angles.sin()).to(x.dtype)


def stacked(name: str, layers: int, sublayers: Sublayers) -> list[LayerBuilder]:
    """Returns builders of `layers` equal layers, each of some sublayers: `name.0.<sublayer>`, …"""
    return [LayerBuilder(f"{name}.{i}.{kind}", build) for i in range(layers) for kind, build in sublayers.items()]
