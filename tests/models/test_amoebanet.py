"""Tests AmoebaNet: published genotypes, counts and sizes, operations with TensorFlow's padding written out."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from gpipe_cli.layers import LayerBuilder
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.amoebanet_genotypes import GENOTYPES, CellGenotype
from gpipe_cli.models.amoebanet_layers import AmoebaCell, CellShape, FactorizedReduction, Pooling, SameConvolution
from gpipe_cli.partition.survey import survey

small = partial(amoebanet, L=3, D=16, classes=5, dropout=0.0, drop_path_keep=1.0)
norm = partial(nn.BatchNorm2d, eps=1e-3)


def build(builders: Sequence[LayerBuilder]) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {builder.name: builder.build() for builder in builders}


def run(layers: dict[str, nn.Module], images: Tensor) -> dict[str, Any]:
    """Returns the boundary after every layer."""
    values: Any = images
    boundaries = {}
    for name, layer in layers.items():
        values = boundaries[name] = layer(values)
    return boundaries


# -- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("genotype", "L", "D", "parameters", "with_auxiliary_head"),
    [
        ("D", 18, 208, 81_137_437, 81_781_529),
        ("D", 72, 512, 1_842_610_248, 1_843_378_372),
        ("B", 18, 512, 557_277_864, 558_045_988),
    ],
)
def test_published_parameter_counts(genotype: str, L: int, D: int, parameters: int, with_auxiliary_head: int) -> None:
    builders, plain = (amoebanet(L, D, 1000, 224, genotype, auxiliary_head=head) for head in (True, False))
    numbers = survey(builders).sizes
    judged = [builder.name for builder in builders].index(f"stack_2.{L // 3 - 1}")  # the only layer with another number
    assert sum(numbers) == with_auxiliary_head
    assert sum(numbers) - numbers[judged] + survey([plain[judged]]).sizes[0] == parameters


# -- the list and its boundaries -------------------------------------------------------------------------------------


def test_the_layers_are_l_plus_six_and_reductions_precede_the_second_and_third_stack() -> None:
    assert [builder.name for builder in small(L=6, image_size=32, auxiliary_head=False)] == [
        *("stem", "stem_cell_1", "stem_cell_2", "stack_1.0", "stack_1.1", "reduction_1", "stack_2.0", "stack_2.1"),
        *("reduction_2", "stack_3.0", "stack_3.1", "head"),
    ]


@pytest.mark.parametrize(
    ("size", "sides"), [(480, [239, 120, 60, 60, 30, 30, 15, 15]), (32, [15, 8, 4, 4, 2, 2, 1, 1])]
)
def test_each_layer_has_the_published_size(size: int, sides: list[int]) -> None:
    with FakeTensorMode():
        boundaries = run(build(small(image_size=size, auxiliary_head=False)), torch.empty(2, 3, size, size))
    outputs = [b[0] if isinstance(b, tuple) else b for b in boundaries.values()]
    assert [tuple(output.shape[2:]) for output in outputs[:-1]] == [(side, side) for side in sides]


@pytest.mark.parametrize("genotype", ["B", "D"])
def test_images_of_three_pixels_train(genotype: str) -> None:
    layers = build(small(image_size=3, genotype=genotype, auxiliary_head=False))
    logits = run(layers, torch.randn(3, 3, 3, 3))["head"]
    logits.square().sum().backward()
    assert logits.shape == (3, 5)
    assert all(p.grad is not None and p.grad.isfinite().all() for m in layers.values() for p in m.parameters())


# -- operations ------------------------------------------------------------------------------------------------------


def test_convolutions_start_with_variance_two_over_fan_out_and_the_classifier_with_one_over_fan_in() -> None:
    torch.manual_seed(0)
    for module, fan_out in (
        (SameConvolution(64, 128, (3, 3), bias=False), 9 * 128),
        (SameConvolution(256, 256, (7, 7), groups=256), 49),
        (SameConvolution(32, 200, (1, 7)), 7 * 200),
    ):
        assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.03)
    head = build(small(classes=500, image_size=32, auxiliary_head=False))["head"]
    assert head.classifier.weight.std().item() == pytest.approx(head.classifier.in_features**-0.5, rel=0.03)
    assert not head.classifier.bias.any()


def padded(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], value: float = 0.0) -> Tensor:
    """Returns x padded for ceil(n / stride) windows, with the odd row and column at the end, as TensorFlow does."""
    height, width = (max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(x.shape[2:], kernel, stride, strict=True))
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2), value=value)


@pytest.mark.parametrize("size", [(7, 8), (8, 7), (1, 2)])
@pytest.mark.parametrize("stride", [1, 2])
def test_operations_pad_as_tensorflow_does(size: tuple[int, int], stride: int) -> None:
    x, steps = torch.randn(2, 4, *size), (stride, stride)
    for kernel in ((1, 7), (7, 1), (3, 3), (5, 5)):
        convolution = SameConvolution(4, 6, kernel, steps, bias=False)
        wanted = F.conv2d(padded(x, kernel, steps), convolution.weight, None, steps)
        torch.testing.assert_close(convolution(x), wanted)
    for k in (2, 3) if stride == 2 else (3,):
        largest = F.max_pool2d(padded(x, (k, k), steps, -torch.inf), k, stride)
        torch.testing.assert_close(Pooling(4, 4, norm, "max", k, stride)(x), largest)
    total, inside = (F.avg_pool2d(padded(values, (3, 3), steps), 3, stride) for values in (x, torch.ones_like(x)))
    torch.testing.assert_close(Pooling(4, 4, norm, "avg", 3, stride)(x), total / inside)


def test_a_factorized_reduction_reads_even_pixels_and_those_further_down_and_right() -> None:
    x, reduction = torch.randn(2, 4, 7, 8), FactorizedReduction(4, 6, lambda width: nn.Identity(), relu=False)
    even = F.conv2d(x, reduction.even.weight, stride=2)
    odd = F.conv2d(F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:], reduction.odd.weight, stride=2)
    torch.testing.assert_close(reduction(x), torch.cat((even, odd), 1))


@pytest.mark.parametrize("genotype", ["B", "D"])
def test_a_cell_is_the_sums_and_the_concatenation_of_its_genotype(genotype: str) -> None:
    kind, (x, previous) = GENOTYPES[genotype].normal, torch.randn(2, 3, 8, 5, 5)
    cell = AmoebaCell(kind, CellShape(8, 8, False, 8, 1), norm, 1.0)
    states, operations = [cell.enter(F.relu(x)), previous], list(cell.operations.values())
    for number, node in enumerate(kind.nodes):
        found = []
        for operation, (_, state) in zip(operations[2 * number :], node, strict=False):
            found.append(operation(F.relu(states[state]) if hasattr(operation, "reads_relu") else states[state]))
        states.append(found[0] + found[1])
    wanted = torch.cat([states[state] for state in kind.concatenated], 1)
    torch.testing.assert_close(cell((x, previous))[0], wanted)


# -- drop path, dropout ----------------------------------------------------------------------------------------------


def cell_of(genotype: CellGenotype, keep: float) -> AmoebaCell:
    torch.manual_seed(0)
    return AmoebaCell(genotype, CellShape(8, 8, False, 8, 1), lambda width: nn.Identity(), keep)


def test_the_share_of_kept_paths_falls_linearly_over_all_steps() -> None:
    cell = cell_of(GENOTYPES["D"].normal, 0.7)
    shares = []
    for step in (0, 25, 50, 99, 100, 150):
        cell.begin_step(step, 100)
        shares.append(round(cell.keep, 6))
    assert shares == [1.0, 0.925, 0.85, 0.703, 0.7, 0.7]
    assert cell.depends_on_steps and not cell_of(GENOTYPES["D"].normal, 1.0).depends_on_steps


def test_drop_path_drops_an_operation_for_whole_examples_and_scales_what_is_left() -> None:
    """Checks the only node, which adds a dropped operation to one that is never dropped."""
    cell = cell_of(CellGenotype(((("avg3", 1), ("none", 1)),), (2,)), 0.25)
    x, previous = torch.randn(400, 8, 3, 3), torch.randn(400, 8, 3, 3)
    whole = cell((x, previous))[0] - previous
    cell.begin_step(1, 1)
    share = (cell((x, previous))[0] - previous) / whole
    per_example = share.flatten(1).mean(1)
    assert torch.allclose(share, per_example[:, None, None, None].expand_as(share), atol=1e-3)
    kept = per_example > 2
    assert torch.allclose(per_example, torch.where(kept, 4.0, 0.0), atol=1e-3)
    assert 0.18 < kept.float().mean().item() < 0.32


def test_drop_path_and_dropout_are_for_training_only() -> None:
    layers = build(amoebanet(3, 16, 5, 32, dropout=0.9, drop_path_keep=0.1, auxiliary_head=False))
    for layer in layers.values():
        layer.eval()
        if hasattr(layer, "begin_step"):
            layer.begin_step(1, 1)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(run(layers, images)["head"], run(layers, images)["head"])


# -- images ------------------------------------------------------------------------------------------------------------


def test_bytes_are_scaled_to_minus_one_and_one() -> None:
    stem = build(small(image_size=32, auxiliary_head=False))["stem"].eval()
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(stem(images), stem(images / 127.5 - 1))


# -- values that cannot work -----------------------------------------------------------------------------------------


def test_an_image_too_small_for_the_auxiliary_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4×4 map .*use model.auxiliary_head=false, or larger images"):
        small(image_size=66)
