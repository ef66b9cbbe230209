"""Defines the evolved cells of AmoebaNet-B and -D, the paper's, as data (Real et al., arXiv 1802.01548).

A cell starts with two states: h0, made of the output of the layer before, and h1, of the one before that. Each node is
the next state, h2 to h6: the sum of two operations on earlier states. The output concatenates some states; the genotype
lists them, because they cannot be derived: in B and D, h0 is read by nodes and still concatenated.

| operation | what it does, as in TensorFlow's published AmoebaNet |
|---|---|
| `1x1` | ReLU, 1×1 convolution, norm |
| `none` | identity; `1x1` where the stride or the width has to change |
| `conv3` | bottleneck of a quarter of the width around a 3×3 convolution |
| `1x7_7x1` | the same around a 1×7 and a 7×1 convolution |
| `sep3` | twice: ReLU, 3×3 depthwise and 1×1 convolution, norm |
| `dil2_sep5` | the same with 5×5: the published code ignores the dilation of its name |
| `max2`, `max3`, `avg3` | pooling, then a 1×1 convolution where the width has to change |
"""

import re
from dataclasses import dataclass

Input = tuple[str, int]  # (operation, number of the state that it reads)


@dataclass(frozen=True)
class CellGenotype:
    """Describes one kind of cell.

    Attributes:
        nodes: the two inputs of h2, h3, …
        concatenated: numbers of the states whose concatenation is the cell's output.
    """

    nodes: tuple[tuple[Input, Input], ...]
    concatenated: tuple[int, ...]


@dataclass(frozen=True)
class Genotype:
    """Holds the normal cell, which keeps height and width, and the reduction cell, which halves them."""

    normal: CellGenotype
    reduction: CellGenotype


def _cell(nodes: str, concatenated: tuple[int, ...]) -> CellGenotype:
    """Reads nodes such as "avg3(0) + max3(0), sep3(1) + none(1)"."""
    inputs = [(operation, int(state)) for operation, state in re.findall(r"(\w+)\((\d)\)", nodes)]
    return CellGenotype(tuple(zip(inputs[::2], inputs[1::2], strict=True)), concatenated)


GENOTYPES = {
    "B": Genotype(
        normal=_cell(
            "1x1(1) + max3(1), none(1) + sep3(0), 1x1(1) + sep3(0), 1x1(2) + none(2), avg3(1) + 1x1(5)",
            concatenated=(0, 3, 4, 6),
        ),
        reduction=_cell(
            "max2(0) + max3(0), none(2) + conv3(1), dil2_sep5(2) + max3(2), none(3) + sep3(1), avg3(4) + 1x1(3)",
            concatenated=(5, 6),
        ),
    ),
    "D": Genotype(
        normal=_cell(
            "1x1(1) + max3(1), none(1) + 1x7_7x1(0), 1x1(0) + 1x7_7x1(0), max3(2) + none(2), avg3(1) + 1x1(5)",
            concatenated=(0, 3, 4, 6),
        ),
        reduction=_cell(
            "max2(0) + max3(0), none(2) + conv3(1), 1x7_7x1(2) + max3(2), none(3) + max2(1), avg3(2) + 1x1(3)",
            concatenated=(4, 5, 6),
        ),
    ),
}
