"""Defines the layers of an AmoebaNet: stem, normal and reduction cells, one with an auxiliary head, and the head.

The boundary after a cell is (its output, the output before it); the second is the cell's own input, passed on as it is.
Outputs have not been through a ReLU: every reader applies its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .amoebanet_genotypes import CellGenotype
from .amoebanet_operations import Convolution, ConvolutionNorm, FactorizedReduction, Norm, build_operation

STEM_WIDTH = 32  # channels after the first convolution
AUXILIARY_POOL, AUXILIARY_STRIDE = 5, 3  # of the auxiliary head's average pooling, without padding
AUXILIARY_WIDTHS = (128, 768)  # of its two convolutions, before they are scaled

Boundary = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class CellShape:
    """Describes the widths around a cell.

    Attributes:
        inputs: channels of the output of the layer before.
        previous: channels of the output before that; None for the first cell, whose both inputs are the stem's output.
        halve_previous: whether that output is twice as high and wide, because the layer before is a reduction.
        width: channels F of every state.
        stride: 2 in a reduction cell.
        is_last: whether the head follows, which reads the output alone.
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
        in_channels: c.
        norm: makes the BatchNorm of a number of channels.
        channels_last: whether the images get this memory format, which all later layers keep.
    """

    def __init__(self, in_channels: int, norm: Norm, channels_last: bool) -> None:
        super().__init__()
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.convolution = Convolution(in_channels, STEM_WIDTH, (3, 3), (2, 2))
        self.norm = norm(STEM_WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        channels = self.convolution.in_channels
        if images.dim() != 4 or images.shape[1] != channels:
            raise ValueError(
                f"model.in_channels={channels}, but the images are {list(images.shape)}: they must be "
                "[b, model.in_channels, H, W]"
            )
        images = images.contiguous(memory_format=self.format)
        if not images.is_floating_point():
            images = (images.to(self.convolution.weight.dtype) / 255 - 0.5) / 0.5
        x = self.convolution(images)
        # Images of one channel have both formats at once; the convolution may then put out the other one.
        output: Tensor = self.norm(x.contiguous(memory_format=self.format))
        return output


class AmoebaCell(nn.Module):
    """Computes a normal or reduction cell: (x, output before x) to (output, x).

    Args:
        genotype: its nodes and output.
        shape: widths and stride.
        norm: makes the BatchNorm of a number of channels.
        drop_path_keep: probability at the end of the run that an example keeps an operation's output; it falls
            linearly from 1, and what is kept is scaled by its inverse (scheduled drop path).
        dilate: give `dil2_sep5` its dilation.
    """

    def __init__(
        self, genotype: CellGenotype, shape: CellShape, norm: Norm, drop_path_keep: float, dilate: bool
    ) -> None:
        super().__init__()
        self.genotype, self.final_keep, self.is_last = genotype, drop_path_keep, shape.is_last
        self.keep = 1.0
        self.enter = ConvolutionNorm(shape.inputs, shape.width, norm)
        self.match = _match(shape, norm)
        self.operations = _operations(genotype, shape, norm, dilate)
        self.shrink = nn.ModuleDict(
            {
                f"h{state}": FactorizedReduction(shape.width, shape.width, norm, relu=False)
                for state in genotype.concatenated
                if state < 2 and shape.stride == 2
            }
        )

    @property
    def depends_on_steps(self) -> bool:
        """Returns whether drop path is on: then a run's length cannot change later (docs/design.md, `begin_step`)."""
        return self.final_keep < 1

    def begin_step(self, step: int, steps: int) -> None:
        """Sets the share of kept paths for step number `step` (from 0) of `steps`."""
        self.keep = 1 - min(1.0, step / max(1, steps)) * (1 - self.final_keep)

    def forward(self, inputs: Boundary) -> Boundary:
        first = isinstance(inputs, Tensor)
        x, previous = (inputs, inputs) if isinstance(inputs, Tensor) else inputs
        states = self._states(x, previous, first)
        chosen = {f"h{state}": states[state] for state in self.genotype.concatenated}
        output = torch.cat([self.shrink[n](state) if n in self.shrink else state for n, state in chosen.items()], 1)
        return output if self.is_last else (output, x)

    def _states(self, x: Tensor, previous: Tensor, first: bool) -> list[Tensor]:
        """Returns h0, h1, h2, …"""
        activated_x = F.relu(x)
        states = [self.enter(activated_x), previous if self.match is None else self.match(previous)]
        activated = {1: activated_x} if first else {}
        kept = self._kept_paths(x)
        outputs = []
        for number, operation in enumerate(self.operations.values()):
            name, state = self.genotype.nodes[number // 2][number % 2]
            if operation.reads_relu and state not in activated:
                activated[state] = F.relu(states[state])
            output = operation(activated[state] if operation.reads_relu else states[state])
            outputs.append(output if kept is None or name == "none" else output * kept[number])
            if number % 2:
                states.append(outputs[-2] + outputs[-1])
        return states

    def _kept_paths(self, x: Tensor) -> Tensor | None:
        """Returns [operations, b, 1, 1, 1]: 1/keep if an example keeps an operation, else 0. None: all kept."""
        if not self.training or self.keep >= 1:
            return None
        chances = torch.rand(len(self.operations), x.shape[0], 1, 1, 1, device=x.device)
        return (chances < self.keep).to(x.dtype) / self.keep


def _operations(genotype: CellGenotype, shape: CellShape, norm: Norm, dilate: bool) -> nn.ModuleDict:
    """Returns the operations by the states they make: `h2_left`, `h2_right`, … Only those on h0 and h1 stride."""
    operations = nn.ModuleDict()
    for number, node in enumerate(genotype.nodes):
        for side, (name, state) in zip(("left", "right"), node, strict=True):
            # In the first cell h1 is the stem's output as it is.
            inputs = shape.inputs if state == 1 and shape.previous is None else shape.width
            stride = shape.stride if state < 2 else 1
            operations[f"h{number + 2}_{side}"] = build_operation(name, inputs, shape.width, stride, norm, dilate)
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
        width_scale: multiplies the widths 128 and 768 of the two convolutions.
    """

    def __init__(self, inputs: int, norm: Norm, map_size: int, classes: int, width_scale: float) -> None:
        super().__init__()
        narrow, wide = (int(width * width_scale) for width in AUXILIARY_WIDTHS)
        self.narrow = ConvolutionNorm(inputs, narrow, norm)
        self.whole_map = Convolution(narrow, wide, (map_size, map_size))
        self.norm = norm(wide)
        self.classifier = Classifier(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(x), AUXILIARY_POOL, AUXILIARY_STRIDE)
        x = F.relu_(self.narrow(x))
        x = F.relu_(self.norm(self.whole_map(x)))
        if x.shape[2:] != (1, 1):
            raise ValueError(
                f"the auxiliary head was made for images of another size: {list(x.shape[2:])} positions are left where "
                "one is expected: set model.image_size to the size of the images, or model.auxiliary_head=false"
            )
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


class AmoebaCellWithAuxiliaryHead(AmoebaCell):
    """Adds the loss of an auxiliary head on the cell's output, in training only.

    The names of the head's parameters, and no others, begin with `auxiliary_head.`; published parameter counts leave
    them out.

    Args:
        head: makes the head, of the channels of its input and `norm`.
        weight: of its loss in the loss of the mini-batch.
        label_smoothing: share of the probability spread evenly over the classes.
        genotype, shape, norm, settings: see `AmoebaCell`.
    """

    def __init__(
        self,
        head: Callable[[int, Norm], AuxiliaryHead],
        weight: float,
        label_smoothing: float,
        genotype: CellGenotype,
        shape: CellShape,
        norm: Norm,
        *settings: Any,
    ) -> None:
        super().__init__(genotype, shape, norm, *settings)
        self.weight, self.label_smoothing = weight, label_smoothing
        self.auxiliary_head = head(len(genotype.concatenated) * shape.width, norm)

    def auxiliary_loss(self, outputs: Boundary, targets: tuple[Tensor, ...]) -> Tensor:
        """Returns the weighted sum over the examples of the smoothed cross-entropy; `targets` begin with labels [b]."""
        logits = self.auxiliary_head(outputs if isinstance(outputs, Tensor) else outputs[0])
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(wide, targets[0], reduction="sum", label_smoothing=self.label_smoothing)
        return self.weight * loss


class Head(nn.Module):
    """Turns x [b, c, H, W] into logits [b, classes]: ReLU, the average over all positions, dropout, a linear map."""

    def __init__(self, inputs: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.classifier = Classifier(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = F.dropout(F.relu(x).mean((2, 3)), self.dropout, self.training)
        logits: Tensor = self.classifier(features)
        return logits
