"""Defines T(L,H,A), the paper's encoder-decoder Transformer for translation, as a list of sub-layers (section 5).

| boundary after | tensors |
|---|---|
| the data | source ids [b, S], target ids [b, T] |
| `source_embedding`, `encoder.*` | x [b, S, d], source mask [b, 1, 1, S] (True: a token), target ids [b, T] |
| `target_embedding`, `decoder.*` | y [b, T, d], memory [b, S, d], source mask [b, 1, 1, S] |
| `decoder.norm` | y [b, T, d] |
| `softmax` | logits [b, T, target_vocabulary] |

Padding stands on the right only. The paper's sizes, all with d_model 1024:

| model | L | H | A | source / target vocabulary | parameters | K |
|---|---|---|---|---|---|---|
| T(6,8192,16) | 6 | 8192 | 16 | 64000 / 32000 | 408,177,920 | |
| T(24,8192,16) | 24 | 8192 | 16 | 64000 / 32000 | 1,239,387,392 | 4 |
| T(12,16384,32) | 12 | 16384 | 32 | 64000 / 32000 | 1,239,203,072 | 2 |
| T(32,16384,32) | 32 | 16384 | 32 | 64000 / 32000 | 3,086,028,032 | 8 |
| T(64,16384,32) | 64 | 16384 | 32 | 64000 / 32000 | 6,040,947,968 | 16 |
| Transformer Big, one language pair | 6 | 8192 | 16 | 32000 / 32000 | 375,409,920 | |
"""

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import ConfigurationError
from ..layers import LayerBuilder
from ..typed_section import Count, CountOrZero, Depth, Even, ShareOrZero, Vocabulary
from . import transformer_layers as parts


class SourceEmbedding(parts.TokenEmbedding):
    """Embeds the source: (source ids [b, S], target ids [b, T]) to (x [b, S, d], source mask [b, 1, 1, S], target ids).

    Args:
        vocabulary, d_model, dropout, positions: arguments of `TokenEmbedding`.
        pad_id: the id of padding.
    """

    def __init__(self, vocabulary: int, d_model: int, dropout: float, positions: parts.Positions, pad_id: int) -> None:
        super().__init__(vocabulary, d_model, dropout, positions)
        self.pad_id = pad_id

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        source, target = inputs
        mask = source != self.pad_id
        mask[:, :1] = True  # a sentence of padding alone sees one position: none would give NaN
        return self.embed(source), mask[:, None, None, :], target


class TargetEmbedding(parts.TokenEmbedding):
    """Embeds the target: (memory, source mask, target ids [b, T]) to (y [b, T, d], memory, source mask)."""

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        memory, mask, target = inputs
        return self.embed(target), memory, mask

    def decode(self, inputs: tuple[Tensor, Tensor, Tensor], cache: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Embeds the next tokens, at the positions after those of the earlier calls."""
        memory, mask, target = inputs
        return self.embed_next(target, cache), memory, mask


class EncoderNorm(nn.LayerNorm):
    """Normalises the encoder's output and passes on the rest of the boundary."""

    graph_varies = False

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]  # a boundary
        return super().forward(inputs[0]), *inputs[1:]


class DecoderNorm(nn.LayerNorm):
    """Normalises the decoder's output and drops memory and source mask."""

    graph_varies = False

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:  # type: ignore[override]  # a boundary
        return super().forward(inputs[0])


def transformer(
    L: Depth,
    H: Count,
    A: Count,
    source_vocabulary: Vocabulary,
    target_vocabulary: Vocabulary,
    d_model: Even = 1024,
    dropout: ShareOrZero = 0.1,
    input_dropout: ShareOrZero = 0.1,
    attention_dropout: ShareOrZero = 0.0,
    depth_scaled_init: bool = True,
    depth_scale_layers: Literal["both", "one"] = "both",
    depth_scale_exponent: float = 0.5,
    tie_embeddings: bool = False,
    share_embeddings: bool = False,
    pad_id: CountOrZero = 0,
    positions: parts.Positions = "sinusoids",
    decoder_layers: Depth | None = None,
) -> list[LayerBuilder]:
    """Returns the list of T(L,H,A): 2 layers for each of the encoder, 3 for each of the decoder, and 5 more.

    Args:
        L: encoder layers, and as many decoder layers without `decoder_layers`.
        H: width of the feed-forward sub-layers.
        A: heads; attention is 64·A wide.
        source_vocabulary, target_vocabulary: numbers of tokens.
        d_model: width between the sub-layers; even.
        dropout, input_dropout, attention_dropout: shares of branches, embeddings and attention weights that are zeroed.
        depth_scaled_init: multiply the Xavier bound of the feed-forward matrices by n^-depth_scale_exponent.
        depth_scale_layers: stacks whose layers n counts: "both" or "one" (L).
        tie_embeddings: one table for target embedding and softmax; in the paper all three are separate.
        share_embeddings: one table for source and target embedding; both sides must have one vocabulary.
        pad_id: the id of padding in the source.
        positions: "sinusoids" added to the embeddings, or "rotary": self-attention turns queries and keys.
        decoder_layers: another number of decoder layers; None: L.

    Raises:
        ConfigurationError: share_embeddings with vocabularies of two sizes.
    """
    if share_embeddings and source_vocabulary != target_vocabulary:
        raise ConfigurationError(
            f"model.share_embeddings=true, but the vocabularies have {source_vocabulary} and {target_vocabulary} "
            "tokens: both sides must have one (data.shared_vocabulary=true)"
        )
    of_decoder = L if decoder_layers is None else decoder_layers
    depth = L + of_decoder if depth_scale_layers == "both" else L
    init_scale = depth**-depth_scale_exponent if depth_scaled_init else 1.0
    heads = (d_model, A, dropout, attention_dropout)
    feed_forward: parts.Sublayers = {"feed_forward": partial(parts.FeedForward, d_model, H, dropout, init_scale)}
    encoder: parts.Sublayers = {"attention": partial(parts.EncoderAttention, *heads, positions), **feed_forward}
    decoder: parts.Sublayers = {
        "self_attention": partial(parts.CausalAttention, *heads, positions),
        "cross_attention": partial(parts.CrossAttention, *heads),
        **feed_forward,
    }
    embedding = (d_model, input_dropout, positions)
    shared = {"weight": "source_embedding.weight"} if share_embeddings else {}
    of_softmax = (shared or {"weight": "target_embedding.weight"}) if tie_embeddings else {}
    return [
        LayerBuilder("source_embedding", partial(SourceEmbedding, source_vocabulary, *embedding, pad_id)),
        *parts.stacked("encoder", L, encoder),
        LayerBuilder("encoder.norm", partial(EncoderNorm, d_model)),
        LayerBuilder("target_embedding", partial(TargetEmbedding, target_vocabulary, *embedding), tied=shared),
        *parts.stacked("decoder", of_decoder, decoder),
        LayerBuilder("decoder.norm", partial(DecoderNorm, d_model)),
        LayerBuilder("softmax", partial(parts.VocabularyProjection, d_model, target_vocabulary), tied=of_softmax),
    ]
