"""Defines modules with code that torch.export alone would lose, keep wrong or refuse."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Perceptron(nn.Module):
    """Has four linear layers; those below change what it does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)
        self.add_parts()

    def add_parts(self) -> None:
        """Makes what a subclass has besides."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.third(self.changed(self.first(x)))))

    def changed(self, h: Tensor) -> Tensor:
        return F.gelu(self.second(h))


# -- these give the same bits ------------------------------------------------------------------------------------------


class Sign(torch.autograd.Function):
    """Has a backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Scaled(torch.autograd.Function):
    """Takes a number and a size beside tensors, returns two tensors and None, and turns a gradient round."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, examples: int, scale: float) -> tuple[Tensor, Tensor, None]:
        return x * scale * examples, weight.view_as(weight), None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scale = inputs[2] * inputs[3]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_weight: Tensor, _: None) -> tuple[Tensor, Tensor, None, None]:
        return -gradient * ctx.scale, 3 * of_weight, None, None


class OwnBackward(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        h, weight, _ = Scaled.apply(Sign.apply(h), self.second.weight, h.shape[0], 0.5)
        return checkpoint(F.linear, h, weight, use_reentrant=True)


class Recurrent(Perceptron):
    def add_parts(self) -> None:
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def changed(self, h: Tensor) -> Tensor:
        return self.second(self.lstm(torch.stack([h, -h], 1))[0][:, 1])


class HalfInside(Perceptron):
    """Computes a part in bfloat16, with weights that are made of others, and with tensors that are no buffers."""

    def add_parts(self) -> None:
        self.second = parametrizations.weight_norm(self.second)
        self.scales = [torch.rand(WIDTH), torch.rand(WIDTH)]

    def changed(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.second(h * self.scales[0])
        return h.float() * self.scales[1]


class Habits(Perceptron):
    """Ties weights by attributes, freezes in train(), fills parts, asks whether it trains, makes a table."""

    def add_parts(self) -> None:
        self.norm, self.table = nn.BatchNorm1d(WIDTH), None
        self.tied = [self.second.weight]

    def train(self, mode: bool = True) -> "Habits":
        super().train(mode)
        self.norm.eval()
        self.first.bias.requires_grad_(False)
        return self

    def changed(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH) / WIDTH
        h = self.norm(self.second(h) + self.table) + F.linear(h, self.tied[0])
        with torch.no_grad():
            h[:, :4] = 0.5
        left, right = h[:, :4], h[:, 4:]
        left.mul_(2)
        right[:, 1] = left[:, 0]
        return h.sin() if self.training else h.cos()


class Marked(Perceptron):
    """Reads a mark of a parameter, and draws whole numbers in place."""

    def add_parts(self) -> None:
        self.second.weight.scale = 2.0  # type: ignore[attr-defined]

    def changed(self, h: Tensor) -> Tensor:
        drawn = torch.empty_like(h).random_(1, 4) if self.training else 0.0
        return self.second(h) * self.second.weight.scale + drawn  # type: ignore[attr-defined]


class Rounds(Perceptron):
    """Sends as many rows to an expert as a share of all, rounded down (Switch Transformers)."""

    def changed(self, h: Tensor) -> Tensor:
        rows = h[:, 0].topk(int(1.25 * h.shape[0] / 2)).indices
        return h.index_add(0, rows, self.second(h[rows]))


class ChangesInput(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2).sub_(1))


class Masked(Perceptron):
    """Has a torch encoder with a mask, whose values torch looks at."""

    def add_parts(self) -> None:
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True), 2)

    def changed(self, h: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(3)
        if not torch.isfinite(h).all() or torch.isnan(h).any():
            h = h.clamp(-1e6, 1e6)
        return self.second(self.encoder(torch.stack([h, -h, h * h], 1), mask).mean(1))


class Pieces(Perceptron):
    """Uses parts of one parameter in several layers."""

    def add_parts(self) -> None:
        self.parts = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.parts.chunk(3)
        h = self.second(self.first(x).tanh() @ first).tanh() @ second
        return self.head(self.third(h).tanh() @ third)


class Experts(Perceptron):
    """Sends examples to experts, leaves out those without any, and keeps a number beside."""

    def changed(self, h: Tensor) -> Tensor:
        shares = h[:, :3].softmax(1)
        self.balance = shares.mean(0).square().sum()
        out = torch.zeros_like(h)
        for number, expert in enumerate((self.second, self.third)):
            rows = torch.where(shares.argmax(1) == number)[0]
            if rows.numel() == 0:
                continue
            out = out.index_add(0, rows, expert(h[rows]) * shares[rows, number : number + 1])
        return out + h


class DrawsInPlace(Perceptron):
    def changed(self, h: Tensor) -> Tensor:
        if not self.training:
            return self.second(h)
        h = self.second(F.gumbel_softmax(h)) + torch.empty_like(h).uniform_(-1, 1)
        h = torch.distributions.Normal(h, 1.0).rsample()  # which looks at its arguments' values
        return h * torch.empty(h.shape[0], 1).bernoulli_(0.5) + torch.empty_like(h).exponential_()


@functools.lru_cache
def cached(width: int) -> Tensor:
    return torch.arange(width) / width


class Keeps(Perceptron):
    """Keeps tables in caches of two kinds, counts, a log that each call writes anew, and a frozen layer in a list."""

    def add_parts(self) -> None:
        self.tables: dict[int, Tensor] = {}
        self.log: list[Tensor] = []
        self.calls, self.frozen = 0, [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    def changed(self, h: Tensor) -> Tensor:
        self.calls += 1
        known = self.frozen[0](h)
        self.log.clear()
        if WIDTH not in self.tables:
            self.tables[WIDTH] = torch.ones(WIDTH).cumsum(0)
        h = h + self.tables[WIDTH]
        self.log.append(h.detach().mean())
        return self.second(h * cached(WIDTH) + known)


class KeptAside(Perceptron):
    """Keeps tensors that are no buffers, in one memory."""

    def add_parts(self) -> None:
        self.table = torch.rand(WIDTH, WIDTH)
        self.forms = [self.table.t(), self.table[1]]

    def changed(self, h: Tensor) -> Tensor:
        return self.second(h @ self.table + h @ self.forms[0]) * self.forms[1]


class Lower(Perceptron):
    """Computes all of its forward under autocast, and by sizes of its input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x - x.sum(0) / len(x)).float() / float(x.shape[0])


# -- these are refused -------------------------------------------------------------------------------------------------


class HooksModule(Perceptron):
    def add_parts(self) -> None:
        self.second.register_full_backward_hook(lambda module, before, after: (-before[0],))


class ReplacesBuffer(Perceptron):
    def add_parts(self) -> None:
        self.register_buffer("centre", torch.zeros(WIDTH))

    def changed(self, h: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * h.detach().mean(0)
        return self.second(h - self.centre)


class ChangesBuffer(ReplacesBuffer):
    def changed(self, h: Tensor) -> Tensor:
        self.centre[:2].mul_(0.9)
        return self.second(h - self.centre)


class HooksParameter(Perceptron):
    def add_parts(self) -> None:
        self.second.weight.register_hook(lambda gradient: 0 * gradient)


class HasExtraState(Perceptron):
    def get_extra_state(self) -> int:
        return 1


class NormalisesTwice(Perceptron):
    def add_parts(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def changed(self, h: Tensor) -> Tensor:
        return self.norm(self.second(self.norm(h)))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(WIDTH))


def spectral_norm() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(3, WIDTH))


class ScriptedPart(Perceptron):
    def add_parts(self) -> None:
        self.second = torch.jit.script(self.second)


class BeginsSteps(Perceptron):
    def begin_step(self, step: int, steps: int) -> None:
        self.rate = step / steps


class EvenOnly(Perceptron):
    """Branches on the number of examples."""

    def changed(self, h: Tensor) -> Tensor:
        return self.second(h) if h.shape[0] % 2 == 0 else h


class TwoInputs(Perceptron):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * weights


class Missing(Perceptron):
    def add_parts(self) -> None:
        torch.load("/nowhere/weights.pt")


def scripted() -> nn.Module:
    return torch.jit.script(Perceptron())


def a_list() -> list[nn.Module]:
    return [Perceptron()]
