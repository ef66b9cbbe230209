"""Defines the operations of AmoebaNet's cells, on tensors [b, channels, height, width] in either memory format.

All follow TensorFlow: SAME padding, with the odd pixel at the bottom and right; convolutions without bias, drawn with
variance 2 / fan-out, each followed by a norm. An operation that starts with a ReLU expects its input *after* the ReLU
(`reads_relu`), so that all operations on one state share one activated copy of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[int], nn.Module]  # makes the BatchNorm of a number of channels
Pair = tuple[int, int]  # (height, width)


def same_padding(size: int, kernel: int, stride: int, dilation: int = 1) -> Pair:
    """Returns the zeros before and after one dimension that give ceil(size / stride) positions, as in TensorFlow."""
    reach = (kernel - 1) * dilation + 1
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2


class Convolution(nn.Conv2d):
    """Convolves without padding or bias; the weights are drawn with variance 2 / fan-out."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: Pair = (1, 1),
        stride: Pair = (1, 1),
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, dilation=dilation, groups=groups, bias=False)

    def reset_parameters(self) -> None:
        fan_out = self.out_channels // self.groups * prod(self.kernel_size)
        nn.init.normal_(self.weight, std=(2 / fan_out) ** 0.5)


class SameConvolution(Convolution):
    """Convolves with SAME padding: the output has ceil(size / stride) positions."""

    def forward(self, x: Tensor) -> Tensor:
        (top, bottom), (left, right) = (
            same_padding(size, *rule)
            for size, *rule in zip(x.shape[2:], self.kernel_size, self.stride, self.dilation, strict=True)
        )
        padding = (top, left)
        if (top, left) != (bottom, right):
            x, padding = F.pad(x, (left, right, top, bottom)), (0, 0)
        return F.conv2d(x, self.weight, None, self.stride, padding, self.dilation, self.groups)


class ConvolutionNorm(nn.Sequential):
    """Applies a SAME convolution and its norm."""

    reads_relu = True

    def __init__(self, inputs: int, outputs: int, norm: Norm, kernel: Pair = (1, 1), stride: Pair = (1, 1)) -> None:
        super().__init__(OrderedDict(convolution=SameConvolution(inputs, outputs, kernel, stride), norm=norm(outputs)))


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
        widened: Tensor = self.widen(F.relu_(x))
        return widened


class SeparableConvolution(nn.Sequential):
    """Applies a k×k convolution to each channel alone, then 1×1 across the channels, then the norm."""

    def __init__(self, inputs: int, width: int, norm: Norm, k: int, stride: int, dilation: int) -> None:
        depthwise = SameConvolution(inputs, inputs, (k, k), (stride, stride), dilation, groups=inputs)
        super().__init__(OrderedDict(depthwise=depthwise, pointwise=ConvolutionNorm(inputs, width, norm)))


class SeparableTwice(nn.Sequential):
    """Applies two separable convolutions with a ReLU between them; only the first has the stride."""

    reads_relu = True

    def __init__(self, inputs: int, width: int, norm: Norm, k: int, stride: int, dilation: int = 1) -> None:
        first = SeparableConvolution(inputs, width, norm, k, stride, dilation)
        second = SeparableConvolution(width, width, norm, k, 1, dilation)
        super().__init__(OrderedDict(first=first, relu=nn.ReLU(inplace=True), second=second))


class Pooling(nn.Module):
    """Pools with SAME padding, then applies 1×1 with norm where the width changes. Averages leave the padding out.

    Args:
        pool: "max" or "avg".
        k: side of the window; at stride 1 it must be odd.
    """

    reads_relu = False

    def __init__(self, inputs: int, width: int, norm: Norm, pool: str, k: int, stride: int) -> None:
        super().__init__()
        self.pool, self.k, self.stride = pool, k, stride
        self.project = None if inputs == width else ConvolutionNorm(inputs, width, norm)

    def forward(self, x: Tensor) -> Tensor:
        # The padding after is that before or one more, which is what ceil_mode adds.
        front = tuple(same_padding(size, self.k, self.stride)[0] for size in x.shape[2:])
        if self.pool == "max":
            x = F.max_pool2d(x, self.k, self.stride, front, ceil_mode=True)
        else:
            x = F.avg_pool2d(x, self.k, self.stride, front, ceil_mode=True, count_include_pad=False)
        return x if self.project is None else self.project(x)


class Identity(nn.Identity):
    """Defines the operation `none` where neither stride nor width changes."""

    reads_relu = False


class FactorizedReduction(nn.Module):
    """Halves height and width: two 1×1 convolutions of every other pixel, the second one pixel further down and right.

    Zeros follow the last row and column. The two outputs are concatenated and share one norm.

    Args:
        relu: whether a ReLU comes first.
    """

    def __init__(self, inputs: int, width: int, norm: Norm, relu: bool) -> None:
        super().__init__()
        self.relu = relu
        self.even = Convolution(inputs, width // 2)
        self.odd = Convolution(inputs, width - width // 2)
        self.norm = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x[:, :, ::2, ::2], x[:, :, 1::2, 1::2]
        if even.shape != odd.shape:
            odd = F.pad(odd, (0, even.shape[3] - odd.shape[3], 0, even.shape[2] - odd.shape[2]))
        if self.relu:
            even, odd = F.relu(even), F.relu(odd)
        normalised: Tensor = self.norm(torch.cat((self.even(even), self.odd(odd)), 1))
        return normalised


def build_operation(name: str, inputs: int, width: int, stride: int, norm: Norm, dilate: bool = False) -> nn.Module:
    """Returns the operation that a genotype names.

    Args:
        name: as in `GENOTYPES`.
        inputs, width: channels of its input and output.
        stride: 1 or 2.
        norm: makes the BatchNorm of a number of channels.
        dilate: give `dil2_sep5` the dilation 2 of its name.
    """
    if name == "none" and stride == 1 and inputs == width:
        return Identity()
    step = (stride, stride)
    separable = partial(SeparableTwice, stride=stride)
    pooling = partial(Pooling, stride=stride)
    kinds: dict[str, Callable[[int, int, Norm], nn.Module]] = {
        "none": partial(ConvolutionNorm, stride=step),
        "1x1": partial(ConvolutionNorm, stride=step),
        "conv3": partial(Bottleneck, kernels=(((3, 3), step),)),
        "1x7_7x1": partial(Bottleneck, kernels=(((1, 7), (1, stride)), ((7, 1), (stride, 1)))),
        "sep3": partial(separable, k=3),
        "sep5": partial(separable, k=5),
        "sep7": partial(separable, k=7),
        "dil2_sep5": partial(separable, k=5, dilation=2 if dilate else 1),
        "max2": partial(pooling, pool="max", k=2),
        "max3": partial(pooling, pool="max", k=3),
        "avg3": partial(pooling, pool="avg", k=3),
    }
    return kinds[name](inputs, width, norm)
