"""Sub-layers of pre-layer-norm Transformers: x + dropout(f(LN(x))), each a layer of the list (paper, section 5).

`x` is the first tensor of the boundary; what stands behind it just travels. Attention is 64·A wide, whatever the width
d of the model is. All projections have biases. An attention layer's `decode` is its forward for one more token, with
the keys and values of the earlier ones read from `cache`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD_WIDTH = 64  # the paper scales the width of attention along with the number of heads A

Boundary = Tensor | tuple[Tensor, ...]


class Projection(nn.Linear):
    """A linear map with a bias of zeros and a Xavier-uniform matrix.

    Args:
        inputs, outputs: widths.
        parts: how many matrices lie side by side in this one; each has the bound that it would have alone.
        scale: multiplies the bound (depth-scaled initialisation).
    """

    def __init__(self, inputs: int, outputs: int, parts: int = 1, scale: float = 1.0) -> None:
        self.parts, self.scale = parts, scale  # before nn.Linear's constructor, which calls reset_parameters
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        bound = self.scale * (6 / (self.in_features + self.out_features / self.parts)) ** 0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)


class Sublayer(nn.Module):
    """What all sub-layers share: the norm in front, dropout and the residual sum behind."""

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.dropout = dropout

    def add(self, x: Tensor, change: Tensor) -> Tensor:
        """x + dropout(change)."""
        return x + F.dropout(change, self.dropout, self.training)


class FeedForward(Sublayer):
    """d → H → d with ReLU, of the encoder, the decoder and the language model alike.

    Args:
        d_model, H: widths.
        dropout: of the residual branch.
        init_scale: multiplies the Xavier bound of both matrices (the paper's depth-scaled initialisation).
    """

    def __init__(self, d_model: int, H: int, dropout: float, init_scale: float = 1.0) -> None:
        super().__init__(d_model, dropout)
        self.hidden = Projection(d_model, H, scale=init_scale)
        self.output = Projection(H, d_model, scale=init_scale)

    def forward(self, inputs: Boundary) -> Boundary:
        if isinstance(inputs, Tensor):
            return self._transform(inputs)
        return self._transform(inputs[0]), *inputs[1:]

    def _transform(self, x: Tensor) -> Tensor:
        return self.add(x, self.output(F.relu(self.hidden(self.norm(x)))))


class Attention(Sublayer):
    """What the three kinds of attention share: heads, fused scaled dot product, the projection behind it."""

    def __init__(self, d_model: int, A: int, dropout: float, attention_dropout: float) -> None:
        super().__init__(d_model, dropout)
        self.heads = A
        self.attention_dropout = attention_dropout
        self.output = Projection(HEAD_WIDTH * A, d_model)

    def split_heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[b, t, parts·64A] as `parts` tensors [b, A, t, 64]: views."""
        batch, length, _ = x.shape
        heads = x.view(batch, length, parts, self.heads, HEAD_WIDTH).unbind(2)
        return tuple(part.transpose(1, 2) for part in heads)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        """[b, A, t, 64] of queries over keys and values [b, A, s, 64] to [b, t, d]; `mask` is True where to look."""
        probability = self.attention_dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(query, key, value, mask, probability, causal)
        batch, _, length, _ = heads.shape
        mixed: Tensor = self.output(heads.transpose(1, 2).reshape(batch, length, self.heads * HEAD_WIDTH))
        return mixed


class EncoderAttention(Attention):
    """Self-attention over the source: (x [b, S, d], source mask [b, 1, 1, S], …) to the same."""

    def __init__(self, d_model: int, A: int, dropout: float, attention_dropout: float) -> None:
        super().__init__(d_model, A, dropout, attention_dropout)
        self.query_key_value = Projection(d_model, 3 * HEAD_WIDTH * A, parts=3)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, mask = inputs[:2]
        query, key, value = self.split_heads(self.query_key_value(self.norm(x)), 3)
        return self.add(x, self.attend(query, key, value, mask)), *inputs[1:]

    def decode(self, inputs: tuple[Tensor, ...], cache: dict[str, Any]) -> tuple[Tensor, ...]:
        """The whole source in the first call of a group; in later calls, where the source has length 0, nothing."""
        return self.forward(inputs) if inputs[0].shape[1] else inputs


class CausalAttention(Attention):
    """Masked self-attention, of the decoder (y [b, T, d], memory, source mask) and of the language model (y alone).

    Padding stands on the right only, so no target looks at it and no mask but the causal one is needed.
    """

    def __init__(self, d_model: int, A: int, dropout: float, attention_dropout: float) -> None:
        super().__init__(d_model, A, dropout, attention_dropout)
        self.query_key_value = Projection(d_model, 3 * HEAD_WIDTH * A, parts=3)

    def forward(self, inputs: Boundary) -> Boundary:
        y, *rest = (inputs,) if isinstance(inputs, Tensor) else inputs
        query, key, value = self.split_heads(self.query_key_value(self.norm(y)), 3)
        y = self.add(y, self.attend(query, key, value, None, causal=True))
        return (y, *rest) if rest else y

    def decode(self, inputs: Boundary, cache: dict[str, Any]) -> Boundary:
        """The next tokens of y; their keys and values join those in `cache`."""
        y, *rest = (inputs,) if isinstance(inputs, Tensor) else inputs
        query, key, value = self.split_heads(self.query_key_value(self.norm(y)), 3)
        if "key" in cache:
            key, value = torch.cat((cache["key"], key), 2), torch.cat((cache["value"], value), 2)
        cache["key"], cache["value"] = key, value
        new, total = query.shape[2], key.shape[2]
        mask = None if new == 1 else y.new_ones(new, total, dtype=torch.bool).tril(total - new)
        y = self.add(y, self.attend(query, key, value, mask))
        return (y, *rest) if rest else y


class CrossAttention(Attention):
    """The decoder's view of the source: (y [b, T, d], memory [b, S, d], source mask [b, 1, 1, S]) to the same."""

    def __init__(self, d_model: int, A: int, dropout: float, attention_dropout: float) -> None:
        super().__init__(d_model, A, dropout, attention_dropout)
        self.query = Projection(d_model, HEAD_WIDTH * A)
        self.key_value = Projection(d_model, 2 * HEAD_WIDTH * A, parts=2)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        y, memory, mask = inputs
        key, value = self.split_heads(self.key_value(memory), 2)
        return self._look(y, key, value, mask), memory, mask

    def decode(self, inputs: tuple[Tensor, Tensor, Tensor], cache: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The next tokens of y; keys, values and mask of the source are kept from the first call of the group."""
        y, memory, mask = inputs
        if memory.shape[1]:
            cache["key"], cache["value"] = self.split_heads(self.key_value(memory), 2)
            cache["mask"] = mask
        return self._look(y, cache["key"], cache["value"], cache["mask"]), memory, mask

    def _look(self, y: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        (query,) = self.split_heads(self.query(self.norm(y)), 1)
        return self.add(y, self.attend(query, key, value, mask))
