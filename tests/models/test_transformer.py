"""Tests the two Transformers: the paper's counts, equality with torch's layers, what padding and order change."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.models import transformer_layers as modules
from gpipe_cli.models.transformer import transformer
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.partition.survey import survey

WORDS, PAD = 13, 0
Attention = modules.EncoderAttention | modules.CausalAttention | modules.CrossAttention
FEED_FORWARD = partial(modules.FeedForward, 128, 96, 0.1)
small = partial(transformer, L=2, H=24, A=2, d_model=16, source_vocabulary=WORDS, target_vocabulary=WORDS)
small_lm = partial(transformer_lm, L=2, H=24, A=2, d_model=16, vocabulary=WORDS, final_norm=True)

SOURCE = torch.tensor([[5, 6, 7, 3], [8, 3, PAD, PAD], [9, 10, 3, PAD]])
TARGET = torch.tensor([[2, 5, 6, 4, 8], [2, 7, 9, PAD, PAD], [2, 4, 4, 4, PAD]])


def build(builders: Sequence[LayerBuilder], training: bool = False, seed: int = 0) -> dict[str, nn.Module]:
    """Builds the modules in float64, with random biases and norms, so that none is zero or one."""
    torch.manual_seed(seed)
    layers = {builder.name: builder.build().double().train(training) for builder in builders}
    for layer in layers.values():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, std=0.5)
    return layers


def run(layers: dict[str, nn.Module], *inputs: Tensor) -> Tensor:
    values: Any = inputs if len(inputs) > 1 else inputs[0]
    for layer in layers.values():
        values = layer(values)
    assert isinstance(values, Tensor)
    return values


# -- counts and names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("L", "parameters"), [(3, 282_178_816), (1663, 83_876_910_336)])
def test_transformer_l_has_the_parameters_of_the_paper(L: int, parameters: int) -> None:
    """Counts the paper's language models; tests/commands/test_experiments.py counts its translation models."""
    assert sum(survey(transformer_lm(L, 8192, 32, 32000, d_model=2048)).sizes) == parameters


# -- against torch's layers ------------------------------------------------------------------------------------------


def copy_feed_forward(ours: modules.FeedForward, norm: nn.LayerNorm, first: nn.Linear, second: nn.Linear) -> None:
    for mine, theirs in ((ours.norm, norm), (ours.hidden, first), (ours.output, second)):
        theirs.load_state_dict(mine.state_dict())


def copy_attention(ours: Attention, norm: nn.LayerNorm, theirs: nn.MultiheadAttention) -> None:
    norm.load_state_dict(ours.norm.state_dict())
    parts = [ours.query, ours.key_value] if isinstance(ours, modules.CrossAttention) else [ours.query_key_value]
    theirs.in_proj_weight.data.copy_(torch.cat([part.weight for part in parts]))
    theirs.in_proj_bias.data.copy_(torch.cat([part.bias for part in parts]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())


@torch.no_grad()
def test_encoder_sublayers_compute_what_torchs_encoder_layer_does() -> None:
    sublayers = {"attention": partial(modules.EncoderAttention, 128, 2, 0.1, 0.0), "feed_forward": FEED_FORWARD}
    attention, feed_forward = build([LayerBuilder(*named) for named in sublayers.items()]).values()
    assert isinstance(attention, modules.EncoderAttention) and isinstance(feed_forward, modules.FeedForward)
    theirs = nn.TransformerEncoderLayer(128, 2, 96, batch_first=True, norm_first=True, dtype=torch.float64).eval()
    copy_attention(attention, theirs.norm1, theirs.self_attn)
    copy_feed_forward(feed_forward, theirs.norm2, theirs.linear1, theirs.linear2)
    x, is_token = torch.randn(3, 4, 128, dtype=torch.float64), SOURCE != PAD
    got, *_ = feed_forward(attention((x, is_token[:, None, None, :])))
    torch.testing.assert_close(got[is_token], theirs(x, src_key_padding_mask=~is_token)[is_token])


@torch.no_grad()
def test_decoder_sublayers_compute_what_torchs_decoder_layer_does() -> None:
    sublayers = {
        "causal": partial(modules.CausalAttention, 128, 2, 0.1, 0.0),
        "cross": partial(modules.CrossAttention, 128, 2, 0.1, 0.0),
    }
    builders = [LayerBuilder(*named) for named in {**sublayers, "feed_forward": FEED_FORWARD}.items()]
    causal, cross, feed_forward = build(builders).values()
    assert isinstance(causal, modules.CausalAttention) and isinstance(cross, modules.CrossAttention)
    assert isinstance(feed_forward, modules.FeedForward)
    theirs = nn.TransformerDecoderLayer(128, 2, 96, batch_first=True, norm_first=True, dtype=torch.float64).eval()
    copy_attention(causal, theirs.norm1, theirs.self_attn)
    copy_attention(cross, theirs.norm2, theirs.multihead_attn)
    copy_feed_forward(feed_forward, theirs.norm3, theirs.linear1, theirs.linear2)
    y, memory = torch.randn(3, 5, 128, dtype=torch.float64), torch.randn(3, 4, 128, dtype=torch.float64)
    is_token = SOURCE != PAD
    got, *_ = feed_forward(cross(causal((y, memory, is_token[:, None, None, :]))))
    no_looking_ahead = torch.ones(5, 5, dtype=torch.bool).triu(1)
    wanted = theirs(y, memory, tgt_mask=no_looking_ahead, memory_key_padding_mask=~is_token)
    torch.testing.assert_close(got, wanted)


# -- what the whole model promises -----------------------------------------------------------------------------------


def test_more_padding_changes_no_prediction() -> None:
    layers = build(small())
    wider = [torch.nn.functional.pad(ids, (0, 3), value=PAD) for ids in (SOURCE, TARGET)]
    torch.testing.assert_close(run(layers, *wider)[:, :5], run(layers, SOURCE, TARGET))


@pytest.mark.parametrize("position", [1, 3])
def test_predictions_do_not_look_ahead(position: int) -> None:
    layers = build(small())
    changed = TARGET.clone()
    changed[:, position:] = 11
    before, after = run(layers, SOURCE, TARGET), run(layers, SOURCE, changed)
    torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-12)
    assert not torch.allclose(after[:, position], before[:, position])


def test_a_sentence_that_is_all_padding_gives_finite_numbers_and_gradients() -> None:
    layers = build(small(), training=True)
    logits = run(layers, torch.full((2, 4), PAD), torch.full((2, 5), PAD))
    logits.sum().backward()
    numbers = [logits] + [parameter.grad for layer in layers.values() for parameter in layer.parameters()]
    assert all(number is not None and bool(number.isfinite().all()) for number in numbers)


# -- how it starts ---------------------------------------------------------------------------------------------------


def test_positions_are_sines_and_cosines_of_falling_frequency() -> None:
    embedding = modules.TokenEmbedding(1, 4, 0.0)
    nn.init.zeros_(embedding.weight)
    wanted = torch.tensor([[0.1411200, 0.0299955, -0.9899925, 0.9995500]])  # sin 3, sin 3/100, cos 3, cos 3/100
    torch.testing.assert_close(embedding.embed(torch.zeros(1, 1, dtype=torch.long), 3)[0], wanted)


@torch.no_grad()
def test_rotary_positions_are_complex_numbers_that_turn_queries_and_keys() -> None:
    attention = modules.CausalAttention(16, 2, 0.0, 0.0, "rotary").double()
    angles = torch.arange(5, 11)[:, None] * 10_000.0 ** (-torch.arange(32).double() / 32)
    turns = torch.polar(torch.ones(6, 32).double(), angles)
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    plain = attention.split_heads(attention.query_key_value(attention.norm(x)), 3)
    for got, one in zip(attention.project(x, 5)[:2], plain, strict=False):
        wanted = torch.complex(*one.chunk(2, -1)) * turns
        torch.testing.assert_close(got, torch.cat((wanted.real, wanted.imag), -1), rtol=1e-5, atol=1e-5)
    rows = modules.TokenEmbedding(9, 4, 0.0, "rotary")
    assert rows.embed(SOURCE % 9, 3).equal(2 * rows.weight[SOURCE % 9])


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, 8**-0.5),
        ({"decoder_layers": 5}, 9**-0.5),
        ({"depth_scale_layers": "one"}, 4**-0.5),
        ({"depth_scaled_init": False}, 1.0),
    ],
    ids=str,
)
def test_depth_scaled_initialisation_shrinks_both_feed_forward_matrices(keys: dict[str, Any], factor: float) -> None:
    builders = {layer.name: layer for layer in transformer(4, 512, 1, 10, 10, d_model=64, **keys)}
    for name in ("encoder.0.feed_forward", "decoder.3.feed_forward"):
        layer = builders[name].build()
        assert isinstance(layer, modules.FeedForward)
        for matrix in (layer.hidden.weight, layer.output.weight):
            assert matrix.abs().max().item() == pytest.approx(factor * (6 / 576) ** 0.5, rel=0.01)


@pytest.mark.parametrize(("make", "table"), [(small, "target_embedding"), (small_lm, "embedding")])
def test_tied_embeddings_are_one_table_of_the_embedding_and_the_softmax(make: Any, table: str) -> None:
    assert survey(make(tie_embeddings=True)).owners[-1] == {"weight": (table, "weight")}
    assert not any(survey(make()).owners)


def test_both_sides_of_one_vocabulary_share_a_table_with_the_softmax_if_it_is_tied() -> None:
    one = {"source_vocabulary": 30, "target_vocabulary": 30, "share_embeddings": True}
    shared = {"weight": ("source_embedding", "weight")}
    assert [of for of in survey(small(**one)).owners if of] == [shared]
    assert [of for of in survey(small(**one, tie_embeddings=True)).owners if of] == [shared, shared]
    with pytest.raises(ConfigurationError, match=r"share_embeddings=true, but the vocabularies have 30 and 20 tokens"):
        small(**{**one, "target_vocabulary": 20})
