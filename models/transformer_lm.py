"""Defines Transformer-L, the language model of the paper's memory and throughput tables (section 3, tables 1 to 3).

It is a stack of masked self-attention and feed-forward sub-layers. With d_model 2048, H 8192, A 32 and 32,000 tokens it
has 50,358,272·L + 131,104,000 parameters, which are the paper's 282.2M (L=3), 785.8M (13), 5.3B (103), 21.0B (415)
and 83.9B (1663). Token ids [b, T] become y [b, T, d] and in the end logits [b, T, vocabulary].
"""

from functools import partial

from torch import nn

from ..layers import LayerBuilder
from ..typed_section import Count, Depth, Even, ShareOrZero, Vocabulary
from . import transformer_layers as parts


class LanguageModelEmbedding(parts.TokenEmbedding):
    """Embeds token ids [b, T] as y [b, T, d]."""

    forward, decode = parts.TokenEmbedding.embed, parts.TokenEmbedding.embed_next


def transformer_lm(
    L: Depth,
    H: Count,
    A: Count,
    vocabulary: Vocabulary,
    d_model: Even = 2048,
    dropout: ShareOrZero = 0.1,
    input_dropout: ShareOrZero = 0.0,
    attention_dropout: ShareOrZero = 0.1,
    depth_scaled_init: bool = False,
    depth_scale_exponent: float = 0.5,
    final_norm: bool = False,
    tie_embeddings: bool = False,
    positions: parts.Positions = "sinusoids",
) -> list[LayerBuilder]:
    """Returns the list of Transformer-L: 2·L + 2 layers, one more with the final norm.

    Args:
        L: layers, each of an attention and a feed-forward sub-layer.
        H: width of the feed-forward sub-layers.
        A: heads; attention is 64·A wide.
        vocabulary: number of tokens.
        d_model: width between the sub-layers; even.
        dropout, input_dropout, attention_dropout: shares of branches, embedding and attention weights that are zeroed.
        depth_scaled_init: multiply the Xavier bound of the feed-forward matrices by L^-depth_scale_exponent.
        final_norm: adds a norm before the softmax; the paper's parameter counts have none.
        tie_embeddings: one table for embedding and softmax; in the paper they are separate.
        positions: "sinusoids" added to the embedding, or "rotary": queries and keys are turned.
    """
    init_scale = L**-depth_scale_exponent if depth_scaled_init else 1.0
    sublayers: parts.Sublayers = {
        "attention": partial(parts.CausalAttention, d_model, A, dropout, attention_dropout, positions),
        "feed_forward": partial(parts.FeedForward, d_model, H, dropout, init_scale),
    }
    table = {"weight": "embedding.weight"} if tie_embeddings else {}
    norm = [LayerBuilder("norm", partial(nn.LayerNorm, d_model))] if final_norm else []
    return [
        LayerBuilder("embedding", partial(LanguageModelEmbedding, vocabulary, d_model, input_dropout, positions)),
        *parts.stacked("decoder", L, sublayers),
        *norm,
        LayerBuilder("softmax", partial(parts.VocabularyProjection, d_model, vocabulary), tied=table),
    ]
