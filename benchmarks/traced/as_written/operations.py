"""Defines modules whose operations are more than their values: in place, gradients, types, control."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.traced.as_written.given import VOCABULARY, WIDTH, given, series, tokens, vectors
from benchmarks.traced.as_written.weights import Net

# -- in place ----------------------------------------------------------------------------------------------------------


@given(vectors)
class FillsPart(Net):
    """Fills a part of its activations under no_grad."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        with torch.no_grad():
            h[:, :4] = 0.5
        return h.sin()


@given(vectors)
class ClampsActivations(Net):
    """Clamps its activations under no_grad, so that gradients pass as if it had not."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        with torch.no_grad():
            h.clamp_(-0.3, 0.3)
        return h.sin()


@given(vectors)
class ClampsData(Net):
    """Clamps its activations by .data."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        h.data.clamp_(-0.3, 0.3)
        return h.sin()


@given(vectors)
class RoundsActivations(Net):
    """Overwrites its activations by rounded ones under no_grad."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        with torch.no_grad():
            h.copy_((h * 8).round() / 8)
        return self.last(h)


@given(vectors)
class ReadsDataOfActivations(Net):
    """Stops a gradient by .data."""

    def middle(self, h: Tensor) -> Any:
        return self.body(h) - h.data


@given(vectors)
class DetachesInPlace(Net):
    """Stops a gradient by detach_()."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        h.detach_()
        return self.last(h).tanh()


@given(vectors)
class WritesOut(Net):
    """Writes into `out`."""

    def middle(self, h: Tensor) -> Any:
        doubled = torch.empty_like(h)
        with torch.no_grad():
            torch.mul(h, 2, out=doubled)
        return self.body(h) + doubled


@given(vectors)
class FillsEmpty(Net):
    """Copies into an empty tensor."""

    def middle(self, h: Tensor) -> Any:
        out = h.new_empty(h.shape)
        out.copy_(self.body(h))
        out[:, 0].zero_()
        return out


@given(vectors)
class ZeroesByMask(Net):
    """Assigns by a mask."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        h[h < 0] = 0
        h.masked_fill_(h > 1, 1)
        return h


@given(vectors)
class ChangesViews(Net):
    """Changes views of its activations in place, with gradients."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        left, right = h[:, :4], h[:, 4:]
        left.mul_(2).add_(1)
        right[:, 1] = left[:, 0] * 3
        return h.sin()


@given(vectors)
class FillsOutput(Net):
    """Writes parts into a tensor of zeros."""

    def middle(self, h: Tensor) -> Any:
        out = torch.zeros_like(h)
        out[:, :4] = self.body(h)[:, :4]
        out[:, 4:] += self.last(h)[:, 4:]
        return out


@given(vectors)
class ReluChains(nn.Module):
    """Applies activations in place, and adds what they have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            h = layer(x)
            x = self.act(h) + h
            x += 0.1
        return self.head(F.elu_(x))


@given(vectors)
class ChangesInput(Net):
    """Normalises its input in place."""

    def forward(self, x: Tensor) -> Any:
        x -= x.mean(-1, keepdim=True)
        x.div_(x.std(-1, keepdim=True))
        return super().forward(x)


# -- gradients ---------------------------------------------------------------------------------------------------------


class Sign(torch.autograd.Function):
    """Defines the identity as its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


class Reversed(torch.autograd.Function):
    """Turns a gradient round, by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


@given(vectors)
class BinaryNet(Net):
    """Makes activations binary, with a straight-through gradient."""

    def middle(self, h: Tensor) -> Any:
        return self.body(Sign.apply(h))


@given(vectors)
class GradientReversal(Net):
    """Puts a second branch behind a reversed gradient."""

    def middle(self, h: Tensor) -> Any:
        return torch.tanh(self.body(h)) + self.last(Reversed.apply(h, 0.3)).tanh()


@given(vectors)
class StopsGradients(Net):
    """Predicts a target that gets no gradient."""

    def middle(self, h: Tensor) -> Any:
        with torch.no_grad():
            target = self.last(h).tanh()
        return (self.body(h) - target) * self.body(h.detach())


@given(vectors)
class StraightThrough(Net):
    """Quantises by the nearest code, with the straight-through estimator written by detach."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, WIDTH)

    def middle(self, h: Tensor) -> Any:
        nearest = self.codes(torch.cdist(h, self.codes.weight).argmin(-1))
        return self.body(h + (nearest - h).detach()) + 0.1 * (nearest - h.detach())


@given(vectors)
class ScalesGradients(Net):
    """Lets a share of the gradient through."""

    def middle(self, h: Tensor) -> Any:
        h = h * 0.1 + (h * 0.9).detach()
        return F.gelu(self.body(h))


@given(vectors)
class HooksActivation(Net):
    """Clips the gradient of an activation by a hook."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]
        return F.gelu(h)


@given(vectors)
class ForwardHooks(Net):
    """Takes features by a forward hook, and changes an output by another."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.stem.register_forward_hook(lambda module, given, output: self.features.update(stem=output))
        self.body.register_forward_hook(lambda module, given, output: output * 2)

    def middle(self, h: Tensor) -> Any:
        return self.body(h) + self.features["stem"]


@given(vectors)
class RecomputesItself(Net):
    """Recomputes a block by itself."""

    def middle(self, h: Tensor) -> Any:
        h = checkpoint(super().middle, h, use_reentrant=False)
        return checkpoint(self.body, h, use_reentrant=True)


@given(vectors)
class InnerGradient(Net):
    """Descends a gradient in forward, as meta-learning and energy models do."""

    def middle(self, h: Tensor) -> Any:
        with torch.enable_grad():
            h = h if h.requires_grad else h.requires_grad_()
            energy = self.body(h).square().sum()
            (slope,) = torch.autograd.grad(energy, h, create_graph=True)
        return h - 0.1 * slope


@given(vectors)
class TeacherInInference(Net):
    """Computes a target in inference mode."""

    def middle(self, h: Tensor) -> Any:
        with torch.inference_mode():
            target = self.last(h)
        return self.body(h) - target


@given(vectors)
class AsksForGradients(Net):
    """Chooses by whether gradients are wanted."""

    def middle(self, h: Tensor) -> Any:
        h = self.body(h) if torch.is_grad_enabled() else self.body(h) * 1.5
        return h.tanh() if h.requires_grad else h.sin()


@given(vectors)
class MapsGradients(Net):
    """Returns derivatives with respect to its input, as networks that solve equations do."""

    def forward(self, x: Tensor) -> Any:
        return vmap(torch.func.grad(lambda row: self.head(torch.tanh(self.stem(row))).sum()))(x)


# -- types -------------------------------------------------------------------------------------------------------------


@given(vectors)
class HalfAccumulator(Net):
    """Adds up float32 in a float16 accumulator."""

    def middle(self, h: Tensor) -> Any:
        total = torch.zeros(h.shape, dtype=torch.float16)
        for _ in range(3):
            total += self.body(h)
        return total.float()


@given(vectors)
class HalfAccumulatorOfInput(Net):
    """Adds float32 to a part of it in float16, with a gradient through both."""

    def middle(self, h: Tensor) -> Any:
        total = self.body(h).half()
        total += h * 1.001
        total.mul_(1.0001)
        return self.last(total.float())


@given(vectors)
class HalfIsland(nn.Module):
    """Keeps one layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.inner.bfloat16()

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.first(x))
        return self.head(self.inner(h.bfloat16()).float() + h.half().float())


@given(series)
class FourierMixing(nn.Module):
    """Mixes tokens by a Fourier transform, filtered by complex weights that are kept as pairs of reals."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
        self.filter = nn.Parameter(torch.randn(4, WIDTH, 2) * 0.3)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(x + torch.fft.fft2(x).real)
        spectrum = torch.fft.rfft(self.inner(x), dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        return self.head(torch.fft.irfft(spectrum, n=x.shape[1], dim=1, norm="ortho"))


# -- control -----------------------------------------------------------------------------------------------------------


@given(vectors)
class BranchesOnTraining(Net):
    """Computes one part in training only, another in evaluation only."""

    def middle(self, h: Tensor) -> Any:
        if self.training:
            return F.gelu(self.body(h)) + 0.1 * self.last(h)
        return F.gelu(self.body(h)) * 0.5


@given(vectors)
class Conditional(Net):
    """Chooses by a value, with torch.cond."""

    def middle(self, h: Tensor) -> Any:
        return torch.cond(h.sum() > 0, lambda h: self.body(h).sin(), lambda h: self.last(h).cos(), (h,))


@given(vectors)
class BranchesOnValue(Net):
    """Chooses by a value, with if."""

    def middle(self, h: Tensor) -> Any:
        return self.body(h) if h.sum() > 0 else h


@given(vectors)
class Ensemble(nn.Module):
    """Runs several heads at once by vmap, with stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.skeleton = nn.Linear(WIDTH, WIDTH), [nn.Linear(WIDTH, 10, device="meta")]
        stacked, _ = stack_module_state([nn.Linear(WIDTH, 10) for _ in range(3)])
        self.stacked = nn.ParameterDict({name: nn.Parameter(value.detach()) for name, value in stacked.items()})

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.stem(x))
        weights = {name: self.stacked[name] for name in ("weight", "bias")}
        return vmap(lambda one: functional_call(self.skeleton[0], one, (h,)))(weights).mean(0)


@given(series)
class MappedOverExamples(nn.Module):
    """Maps code for one example over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.score, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        def one(rows: Tensor) -> Any:
            h = torch.tanh(self.inner(rows))
            return (self.score(h).softmax(0) * h).sum(0)

        return self.head(vmap(one)(x))


@given(vectors)
class OwnGenerator(Net):
    """Adds the same noise in each call, from a generator that it seeds."""

    def middle(self, h: Tensor) -> Any:
        noise = torch.rand(h.shape[-1], generator=torch.Generator().manual_seed(5))
        return self.body(h + noise)


@given(vectors)
class KeepsGenerator(Net):
    """Adds noise from a generator that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def middle(self, h: Tensor) -> Any:
        return self.body(h + torch.rand(h.shape[-1], generator=self.generator))


@given(vectors)
class SeedsInForward(Net):
    """Draws the same random features in each call."""

    def middle(self, h: Tensor) -> Any:
        torch.manual_seed(0)
        return self.body(h @ torch.randn(WIDTH, WIDTH))


@given(vectors)
class ReadsItem(Net):
    """Divides by the value of a parameter as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def middle(self, h: Tensor) -> Any:
        return self.body(h) / self.temperature.item() + self.temperature


@given(vectors)
class AssertsFinite(Net):
    """Asserts of each activation that it is a number."""

    def middle(self, h: Tensor) -> Any:
        assert not torch.isnan(h).any()
        return self.body(h)


@given(tokens)
class MasksPadding(nn.Module):
    """Averages the embeddings of tokens that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, ids: Tensor) -> Any:
        real = (ids != 0).unsqueeze(-1)
        h = torch.where(real, torch.tanh(self.inner(self.embedding(ids))), 0.0)
        return self.head(h.masked_fill(~real, 0).sum(1) / real.sum(1).clamp(min=1))


def gelu(x: Tensor) -> Tensor:
    """Returns an approximation, as files of 2019 have it."""
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


@given(vectors)
class ScriptedFunction(Net):
    """Fuses a function by torch.jit.script."""

    def __init__(self) -> None:
        super().__init__()
        self.gelu = torch.jit.script(gelu)

    def middle(self, h: Tensor) -> Any:
        return self.gelu(self.body(h))
