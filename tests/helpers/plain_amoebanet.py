"""Defines AmoebaNet a second time, as one ordinary module, to compare the layer list and the engine with it.

Nothing here comes from gpipe_cli. Cells are strings as in the papers' figures, padding is written out pixel by pixel,
and the network is a loop that carries the last two outputs. Parameters are made in the order in which an example meets
them, which is how the weights of the two find each other.
"""

import math
import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORMAL = {
    "B": "1x1(h1)+max3(h1), none(h1)+sep3(h0), 1x1(h1)+sep3(h0), 1x1(h2)+none(h2), avg3(h1)+1x1(h5) > 0 3 4 6",
    "D": "1x1(h1)+max3(h1), none(h1)+1x7_7x1(h0), 1x1(h0)+1x7_7x1(h0), max3(h2)+none(h2), avg3(h1)+1x1(h5) > 0 3 4 6",
}
REDUCTION = {
    "B": "max2(h0)+max3(h0), none(h2)+conv3(h1), sep5(h2)+max3(h2), none(h3)+sep3(h1), avg3(h4)+1x1(h3) > 5 6",
    "D": "max2(h0)+max3(h0), none(h2)+conv3(h1), 1x7_7x1(h2)+max3(h2), none(h3)+max2(h1), avg3(h2)+1x1(h3) > 4 5 6",
}


def pad_as_tensorflow(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], value: float = 0.0) -> Tensor:
    """Returns x padded for ceil(n / stride) windows, with the odd row and column at the end."""
    for dim, k, s in ((2, kernel[0], stride[0]), (3, kernel[1], stride[1])):
        windows = math.ceil(x.shape[dim] / s)
        missing = max((windows - 1) * s + k - x.shape[dim], 0)
        for amount, behind in ((missing // 2, False), (missing - missing // 2, True)):
            shape = list(x.shape)
            shape[dim] = amount
            border = x.new_full(shape, value)
            x = torch.cat((x, border) if behind else (border, x), dim)
    return x


class Conv(nn.Module):
    """Applies a SAME convolution and BatchNorm."""

    def __init__(self, i: int, o: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.conv = nn.Conv2d(i, o, kernel, stride, bias=False)
        self.bn = nn.BatchNorm2d(o, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(pad_as_tensorflow(x, self.kernel, self.stride)))


class Separable(nn.Module):
    def __init__(self, i: int, o: int, k: int, s: int) -> None:
        super().__init__()
        self.k, self.s = k, s
        self.depthwise = nn.Conv2d(i, i, k, s, groups=i, bias=False)
        self.pointwise = Conv(i, o)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(self.depthwise(pad_as_tensorflow(F.relu(x), (self.k, self.k), (self.s, self.s))))


class Pool(nn.Module):
    def __init__(self, kind: str, k: int, s: int) -> None:
        super().__init__()
        self.kind, self.k, self.s = kind, k, s

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = (self.k, self.k), (self.s, self.s)
        if self.kind == "max":
            return F.max_pool2d(pad_as_tensorflow(x, kernel, stride, -math.inf), kernel, stride)
        total = F.avg_pool2d(pad_as_tensorflow(x, kernel, stride), kernel, stride, divisor_override=1)
        inside = F.avg_pool2d(pad_as_tensorflow(torch.ones_like(x), kernel, stride), kernel, stride, divisor_override=1)
        return total / inside


class Halve(nn.Module):
    """Applies a factorised reduction."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(i, o // 2, 1, stride=2, bias=False)
        self.two = nn.Conv2d(i, o - o // 2, 1, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(o, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.bn(torch.cat((self.one(x), self.two(shifted)), 1))


def operation(name: str, i: int, f: int, s: int) -> nn.Module:
    """Returns an operation from the table."""
    if name == "none":
        return nn.Identity() if s == 1 and i == f else operation("1x1", i, f, s)
    if name == "1x1":
        return nn.Sequential(nn.ReLU(), Conv(i, f, (1, 1), (s, s)))
    if name.startswith("sep"):
        return nn.Sequential(Separable(i, f, int(name[3]), s), Separable(f, f, int(name[3]), 1))
    if name[:3] in ("max", "avg"):
        pool = Pool(name[:3], int(name[3]), s)
        return pool if i == f else nn.Sequential(pool, Conv(i, f))
    quarter = f // 4
    middle = {
        "conv3": [Conv(quarter, quarter, (3, 3), (s, s))],
        "1x7_7x1": [Conv(quarter, quarter, (1, 7), (1, s)), nn.ReLU(), Conv(quarter, quarter, (7, 1), (s, 1))],
    }[name]
    return nn.Sequential(nn.ReLU(), Conv(i, quarter), nn.ReLU(), *middle, nn.ReLU(), Conv(quarter, f))


class Cell(nn.Module):
    def __init__(self, text: str, i: int, before: int | None, f: int, s: int, before_is_larger: bool) -> None:
        super().__init__()
        nodes, concatenated = text.split(" > ")
        self.inputs = [(name, int(state)) for name, state in re.findall(r"(\w+)\(h(\d)\)", nodes)]
        self.concatenated = [int(state) for state in concatenated.split()]
        self.base = nn.Sequential(nn.ReLU(), Conv(i, f))
        self.match: nn.Module = nn.Identity()
        if before is not None and before_is_larger:
            self.match = nn.Sequential(nn.ReLU(), Halve(before, f))
        elif before is not None and before != f:
            self.match = nn.Sequential(nn.ReLU(), Conv(before, f))
        widths = [f, i if before is None else f] + [f] * 5
        made = (operation(name, widths[state], f, s if state < 2 else 1) for name, state in self.inputs)
        self.operations = nn.ModuleList(made)
        self.shrink = nn.ModuleDict({str(c): Halve(f, f) for c in self.concatenated if c < 2 and s == 2})

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        h = [self.base(x), self.match(before)]
        done = 0
        while done < 10:
            left, right = (self.operations[n](h[self.inputs[n][1]]) for n in (done, done + 1))
            h.append(left + right)
            done += 2
        return torch.cat([self.shrink[str(c)](h[c]) if str(c) in self.shrink else h[c] for c in self.concatenated], 1)


class PlainAmoebaNet(nn.Module):
    """Computes logits, and those of the auxiliary head (None without one).

    Args:
        auxiliary_map: side of the auxiliary head's map; 0: no such head.
    """

    def __init__(self, L: int, D: int, classes: int, genotype: str, auxiliary_map: int = 0) -> None:
        super().__init__()
        normal, reduction = NORMAL[genotype], REDUCTION[genotype]
        n_normal, n_reduction = (len(text.split(" > ")[1].split()) for text in (normal, reduction))
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, bias=False), nn.BatchNorm2d(32, eps=1e-3))
        self.cells = nn.ModuleList([Cell(reduction, 32, None, D // 4, 2, False)])
        self.cells.append(Cell(reduction, n_reduction * (D // 4), 32, D // 2, 2, True))
        outputs = [n_reduction * (D // 4), n_reduction * (D // 2)]
        larger, f = True, D
        self.judged = None
        for number in range(L):
            if number in (L // 3, 2 * L // 3):
                f *= 2
                self.cells.append(Cell(reduction, outputs[-1], outputs[-2], f, 2, larger))
                outputs.append(n_reduction * f)
                larger = True
            self.cells.append(Cell(normal, outputs[-1], outputs[-2], f, 1, larger))
            outputs.append(n_normal * f)
            larger = False
            if number == 2 * L // 3 - 1 and auxiliary_map:
                self.judged = len(self.cells)
                self.aux = nn.ModuleList([Conv(outputs[-1], 51), nn.Conv2d(51, 307, auxiliary_map, bias=False)])
                self.aux.extend([nn.BatchNorm2d(307, eps=1e-3), nn.Linear(307, classes)])
        self.fc = nn.Linear(outputs[-1], classes)

    def in_order(self) -> list[nn.Parameter]:
        """Returns the parameters in the order of the forward pass; the auxiliary head comes after its cell."""
        modules = [self.stem, *self.cells, self.fc]
        if self.judged is not None:
            modules.insert(1 + self.judged, self.aux)
        return [parameter for module in modules for parameter in module.parameters()]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.stem(images)
        before, auxiliary = x, None
        for number, cell in enumerate(self.cells, start=1):
            x, before = cell(x, before), x
            if number == self.judged:
                narrow, whole, bn, fc = self.aux
                y = F.relu(narrow(F.avg_pool2d(F.relu(x), 5, 3)))
                auxiliary = fc(F.relu(bn(whole(y))).flatten(1))
        return self.fc(F.relu(x).mean((2, 3))), auxiliary
