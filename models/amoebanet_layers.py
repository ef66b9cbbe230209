"""Defines the layers of an AmoebaNet: stem, normal and reduction cells, one with an auxiliary head, and the head.

The boundary after a cell is (its output, the output before it); the second is the cell's own input, passed on as it is.
Outputs have not been through a ReLU: every reader applies its own.

The operations of a cell work on tensors [b, channels, height, width] in either memory format. All follow TensorFlow:
SAME padding, with the odd pixel at the bottom and right; convolutions without bias, drawn with variance 2 / fan-out,
each followed by a norm. An operation that starts with a ReLU expects its input *after* the ReLU (`reads_relu`), so that
all operations on one state share one activated copy of it.
"""

# A module's call returns Any, as torch declares it:
# mypy: no-warn-return-any

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .amoebanet_genotypes import CellGenotype

STEM_WIDTH = 32  # channels after the first convolution
AUXILIARY_POOL, AUXILIARY_STRIDE = 5, 3  # window and stride of the auxiliary head's average pooling, without padding
AUXILIARY_WIDTHS = (51, 307)  # of its two convolutions: 0.4 times the published 128 and 768

Boundary = Tensor | tuple[Tensor, Tensor]
Norm = Callable[[int], nn.Module]  # makes the BatchNorm of a number of channels
Pair = tuple[int, int]  # (height, width)


# -- operations --------------------------------------------------------------------------------------------------------


def same_padding(size: int, kernel: int, stride: int) -> Pair:
    """Returns the zeros before and after one dimension that give ceil(size / stride) positions, as in TensorFlow."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class Convolution(nn.Conv2d):
    """Convolves; the weights are drawn with variance 2 / fan-out. It must be made with bias=False."""

    def reset_parameters(self) -> None:
        fan_out = self.out_channels // self.groups * prod(self.kernel_size)
        nn.init.normal_(self.weight, std=(2 / fan_out) ** 0.5)


class SameConvolution(Convolution):
    """Convolves with SAME padding: the output has ceil(size / stride) positions."""

    def forward(self, x: Tensor) -> Tensor:
        (top, bottom), (left, right) = (
            same_padding(size, *rule) for size, *rule in zip(x.shape[2:], self.kernel_size, self.stride, strict=True)
        )
        padding = (top, left)
        if (top, left) != (bottom, right):
            x, padding = F.pad(x, (left, right, top, bottom)), (0, 0)
        return F.conv2d(x, self.weight, None, self.stride, padding, groups=self.groups)


class ConvolutionNorm(nn.Sequential):
    """Applies a SAME convolution and its norm."""

    reads_relu = True

    def __init__(self, inputs: int, outputs: int, norm: Norm, kernel: Pair = (1, 1), stride: Pair = (1, 1)) -> None:
        convolution = SameConvolution(inputs, outputs, kernel, stride, bias=False)
        super().__init__(OrderedDict(convolution=convolution, norm=norm(outputs)))


class Bottleneck(nn.Module):
    """Applies 1×1 to a quarter of the width, the kernels one after the other, 1×1 to the width; a norm after each.

    Args:
        kernels: (kernel, stride) of each convolution in the middle.
    """

    reads_relu = True

    def __init__(self, inputs: int, width: int, norm: Norm, kernels: tuple[tuple[Pair, Pair], ...]) -> None:
        super().__init__()
        quarter = width // 4
        self.narrow = ConvolutionNorm(inputs, quarter, norm)
        self.middle = nn.ModuleList(ConvolutionNorm(quarter, quarter, norm, *kernel) for kernel in kernels)
        self.widen = ConvolutionNorm(quarter, width, norm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.narrow(x)
        for convolution in self.middle:
            x = convolution(F.relu_(x))  # in place: nothing else holds the norm's output
        return self.widen(F.relu_(x))


class SeparableConvolution(nn.Sequential):
    """Applies a k×k convolution to each channel alone, then 1×1 across the channels, then the norm."""

    def __init__(self, inputs: int, width: int, norm: Norm, k: int, stride: int) -> None:
        depthwise = SameConvolution(inputs, inputs, k, stride, groups=inputs, bias=False)
        super().__init__(OrderedDict(depthwise=depthwise, pointwise=ConvolutionNorm(inputs, width, norm)))


class SeparableTwice(nn.Sequential):
    """Applies two separable convolutions with a ReLU between them; only the first has the stride."""

    reads_relu = True

    def __init__(self, inputs: int, width: int, norm: Norm, k: int, stride: int) -> None:
        first = SeparableConvolution(inputs, width, norm, k, stride)
        second = SeparableConvolution(width, width, norm, k, 1)
        super().__init__(OrderedDict(first=first, relu=nn.ReLU(inplace=True), second=second))


class Pooling(nn.Module):
    """Pools with SAME padding, then applies 1×1 with norm where the width changes. Averages leave the padding out.

    Args:
        pool: "max" or "avg".
        k: side of the window; at stride 1 it must be odd.
    """

    def __init__(self, inputs: int, width: int, norm: Norm, pool: str, k: int, stride: int) -> None:
        super().__init__()
        self.pool, self.k, self.stride = pool, k, stride
        self.project = None if inputs == width else ConvolutionNorm(inputs, width, norm)

    def forward(self, x: Tensor) -> Tensor:
        # At the end SAME padding has the same zeros as in front or one more; ceil_mode adds that one.
        front = tuple(same_padding(size, self.k, self.stride)[0] for size in x.shape[2:])
        if self.pool == "max":
            x = F.max_pool2d(x, self.k, self.stride, front, ceil_mode=True)
        else:
            x = F.avg_pool2d(x, self.k, self.stride, front, ceil_mode=True, count_include_pad=False)
        return x if self.project is None else self.project(x)


class FactorizedReduction(nn.Module):
    """Halves height and width: two 1×1 convolutions of every other pixel, the second one pixel further down and right.

    Zeros follow the last row and column. The two outputs are concatenated and share one norm.

    Args:
        relu: True if a ReLU comes first.
    """

    def __init__(self, inputs: int, width: int, norm: Norm, relu: bool) -> None:
        super().__init__()
        self.relu = relu
        self.even = Convolution(inputs, width // 2, 1, bias=False)
        self.odd = Convolution(inputs, width - width // 2, 1, bias=False)
        self.norm = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x[:, :, ::2, ::2], x[:, :, 1::2, 1::2]
        if even.shape != odd.shape:
            odd = F.pad(odd, (0, even.shape[3] - odd.shape[3], 0, even.shape[2] - odd.shape[2]))
        if self.relu:
            even, odd = F.relu(even), F.relu(odd)
        return self.norm(torch.cat((self.even(even), self.odd(odd)), 1))


def build_operation(name: str, inputs: int, width: int, stride: int, norm: Norm) -> nn.Module:
    """Returns the operation that a genotype names.

    Args:
        name: name of the operation, see `amoebanet_genotypes.py`.
        inputs, width: channels of its input and output.
        stride: 1 or 2.
        norm: makes the BatchNorm of a number of channels.
    """
    if name == "none" and stride == 1 and inputs == width:
        return nn.Identity()
    step = (stride, stride)
    separable = partial(SeparableTwice, stride=stride)
    pooling = partial(Pooling, stride=stride)
    kinds: dict[str, Callable[[int, int, Norm], nn.Module]] = {
        "none": partial(ConvolutionNorm, stride=step),
        "1x1": partial(ConvolutionNorm, stride=step),
        "conv3": partial(Bottleneck, kernels=(((3, 3), step),)),
        "1x7_7x1": partial(Bottleneck, kernels=(((1, 7), (1, stride)), ((7, 1), (stride, 1)))),
        "sep3": partial(separable, k=3),
        "dil2_sep5": partial(separable, k=5),
        "max2": partial(pooling, pool="max", k=2),
        "max3": partial(pooling, pool="max", k=3),
        "avg3": partial(pooling, pool="avg", k=3),
    }
    return kinds[name](inputs, width, norm)


# -- layers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellShape:
    """Describes the widths around a cell.

    Attributes:
        inputs: channels of the output of the layer before.
        previous: channels of the output before that; None for the first cell, whose both inputs are the stem's output.
        halve_previous: True if that output is twice as high and wide, because the layer before is a reduction.
        width: channels F of every state.
        stride: 2 in a reduction cell.
        is_last: True if the head follows, which reads the output alone.
    """

    inputs: int
    previous: int | None
    halve_previous: bool
    width: int
    stride: int
    is_last: bool = False


class Stem(nn.Module):
    """Turns images [b, c, H, W] into [b, 32, (H−1)//2, (W−1)//2]: 3×3, stride 2, no padding, then a norm.

    Bytes are scaled to [−1, 1] first, here on the device, because they travel at a quarter of the size; floating-point
    images are taken as they are.

    Args:
        in_channels: number of channels c of the images.
        norm: makes the BatchNorm of a number of channels.
    """

    def __init__(self, in_channels: int, norm: Norm) -> None:
        super().__init__()
        self.convolution = Convolution(in_channels, STEM_WIDTH, 3, 2, bias=False)
        self.norm = norm(STEM_WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)  # all later layers keep this format
        if not images.is_floating_point():
            images = (images.to(self.convolution.weight.dtype) / 255 - 0.5) / 0.5
        x = self.convolution(images)
        # Images of one channel have both formats at once; the convolution may then put out the other one.
        return self.norm(x.contiguous(memory_format=torch.channels_last))


class AmoebaCell(nn.Module):
    """Computes a normal or reduction cell: (x, output before x) to (output, x).

    Args:
        genotype: its nodes and output.
        shape: widths and stride.
        norm: makes the BatchNorm of a number of channels.
        drop_path_keep: probability at the end of the run that an example keeps an operation's output; it falls
            linearly from 1, and what is kept is scaled by its inverse (scheduled drop path).
    """

    graph_varies = False  # drop path multiplies, or is off in a whole step

    def __init__(self, genotype: CellGenotype, shape: CellShape, norm: Norm, drop_path_keep: float) -> None:
        super().__init__()
        self.genotype, self.final_keep, self.is_last = genotype, drop_path_keep, shape.is_last
        self.keep = 1.0
        self.enter = ConvolutionNorm(shape.inputs, shape.width, norm)
        self.match = _match(shape, norm)
        self.operations = _operations(genotype, shape, norm)
        shrunk = [state for state in genotype.concatenated if state < 2 and shape.stride == 2]
        shrink = partial(FactorizedReduction, shape.width, shape.width, norm, relu=False)
        self.shrink = nn.ModuleDict({f"h{state}": shrink() for state in shrunk})

    @property
    def depends_on_steps(self) -> bool:
        """Returns True if drop path is on: then a run's length cannot change later (docs/design.md, `begin_step`)."""
        return self.final_keep < 1

    def begin_step(self, step: int, steps: int) -> None:
        """Sets the share of kept paths for step number `step` (from 0) of `steps`."""
        self.keep = 1 - min(1.0, step / max(1, steps)) * (1 - self.final_keep)

    def forward(self, inputs: Boundary) -> Boundary:
        """Computes the cell. The first cell gets a single tensor, the stem's output, and takes it for both inputs."""
        x, previous = (inputs, inputs) if isinstance(inputs, Tensor) else inputs
        states = self._states(x, previous, first=isinstance(inputs, Tensor))
        chosen = {f"h{number}": states[number] for number in self.genotype.concatenated}
        for name, shrink in self.shrink.items():  # in a reduction cell h0 and h1 are twice as high and wide as the rest
            chosen[name] = shrink(chosen[name])
        output = torch.cat([*chosen.values()], 1)
        return output if self.is_last else (output, x)

    def _states(self, x: Tensor, previous: Tensor, first: bool) -> list[Tensor]:
        """Computes the states of the cell: h0 and h1 from its inputs, then one for each node.

        Args:
            x, previous: outputs of the layer before, and of the one before that.
            first: True for the first cell, where both are the stem's output.
        """
        activated_x = F.relu(x)
        states = [self.enter(activated_x), previous if self.match is None else self.match(previous)]
        activated = {1: activated_x} if first else {}
        kept = self._kept_paths(x)
        outputs = []
        for number, operation in enumerate(self.operations.values()):
            name, state = self.genotype.nodes[number // 2][number % 2]
            reads_relu = getattr(operation, "reads_relu", False)
            if reads_relu and state not in activated:
                activated[state] = F.relu(states[state])
            output = operation(activated[state] if reads_relu else states[state])
            outputs.append(output if kept is None or name == "none" else output * kept[number])
            if number % 2:
                states.append(outputs[-2] + outputs[-1])
        return states

    def _kept_paths(self, x: Tensor) -> Tensor | None:
        """Draws [operations, b, 1, 1, 1]: 1/keep if an example keeps an operation, else 0. None: all are kept."""
        if not self.training or self.keep >= 1:
            return None
        chances = torch.rand(len(self.operations), x.shape[0], 1, 1, 1, device=x.device)
        return (chances < self.keep).to(x.dtype) / self.keep


def _operations(genotype: CellGenotype, shape: CellShape, norm: Norm) -> nn.ModuleDict:
    """Returns the operations, two for each state that they make: `h2_left`, `h2_right`, …

    Only operations on h0 and h1 have the cell's stride.
    """
    operations = nn.ModuleDict()
    for number, node in enumerate(genotype.nodes):
        for side, (name, state) in zip(("left", "right"), node, strict=True):
            # In the first cell h1 is the stem's output as it is.
            inputs = shape.inputs if state == 1 and shape.previous is None else shape.width
            stride = shape.stride if state < 2 else 1
            operations[f"h{number + 2}_{side}"] = build_operation(name, inputs, shape.width, stride, norm)
    return operations


def _match(shape: CellShape, norm: Norm) -> nn.Module | None:
    """Returns the layer that brings the earlier input to the size and width of h0; None if it fits."""
    if shape.previous is None:
        return None
    if shape.halve_previous:
        return FactorizedReduction(shape.previous, shape.width, norm, relu=True)
    if shape.previous != shape.width:
        return nn.Sequential(nn.ReLU(), ConvolutionNorm(shape.previous, shape.width, norm))
    return None


class Classifier(nn.Linear):
    """Maps linearly, with weights drawn with variance 1 / fan-in and a bias of zeros.

    The convolutions' 2 / fan-out would start at a loss of 14 with 10 classes and train badly (docs/images.md).
    """

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        nn.init.zeros_(self.bias)


class AuxiliaryHead(nn.Module):
    """Computes logits [b, classes] in mid-network: pooling, 1×1, a convolution over the whole map, a classifier.

    Args:
        inputs: channels of the cell's output.
        norm: makes the BatchNorm of a number of channels.
        map_size: side of its map after the pooling.
        classes: number of logits.
    """

    def __init__(self, inputs: int, norm: Norm, map_size: int, classes: int) -> None:
        super().__init__()
        narrow, wide = AUXILIARY_WIDTHS
        self.narrow = ConvolutionNorm(inputs, narrow, norm)
        self.whole_map = Convolution(narrow, wide, map_size, bias=False)
        self.norm = norm(wide)
        self.classifier = Classifier(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(x), AUXILIARY_POOL, AUXILIARY_STRIDE)
        x = F.relu_(self.narrow(x))
        x = F.relu_(self.norm(self.whole_map(x)))
        return self.classifier(x.flatten(1))


class AmoebaCellWithAuxiliaryHead(AmoebaCell):
    """Adds the loss of an auxiliary head on the cell's output, in training only.

    The names of the head's parameters, and no others, begin with `auxiliary_head.`; published parameter counts leave
    them out.

    Args:
        head: makes the head.
        weight: factor of its loss in the loss of the mini-batch.
        label_smoothing: share of the probability spread evenly over the classes.
        cell: arguments of `AmoebaCell`.
    """

    def __init__(self, head: Callable[[], AuxiliaryHead], weight: float, label_smoothing: float, *cell: Any) -> None:
        super().__init__(*cell)
        self.weight, self.label_smoothing, self.auxiliary_head = weight, label_smoothing, head()

    def auxiliary_loss(self, outputs: Boundary, targets: tuple[Tensor, ...]) -> Tensor:
        """Returns the weighted sum over the examples of the smoothed cross-entropy; `targets` begin with labels [b]."""
        logits = self.auxiliary_head(outputs if isinstance(outputs, Tensor) else outputs[0])
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(wide, targets[0], reduction="sum", label_smoothing=self.label_smoothing)
        return self.weight * loss


class Head(nn.Module):
    """Turns x [b, c, H, W] into logits [b, classes]: ReLU, the average over all positions, dropout, a linear map."""

    graph_varies = False

    def __init__(self, inputs: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.classifier = Classifier(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = F.dropout(F.relu(x).mean((2, 3)), self.dropout, self.training)
        return self.classifier(features)
