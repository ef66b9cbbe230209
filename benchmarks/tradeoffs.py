"""Compares GPipe with the methods that its paper names (sections 2.3 and 6), on the same small Transformer.

engine        this engine's pipeline: one set of weights, boundaries are sent, one update a mini-batch
tensor-sliced each product with a weight matrix (of one-hot tokens, too) is divided among all processes, an all-reduce
              adds up its parts, and an all-gather the slices of its input's gradient (SPMD, as in Mesh-TensorFlow)
asynchronous  one update a micro-batch and no flush: each stage keeps the weights that a micro-batch's forward has used
              until its backward (weight stashing, PipeDream)

Real processes train the same weights on the same tokens by plain SGD, the asynchronous pipeline with 1/M of the
gradient at M times as many updates. Before anything is measured each is checked: gradients against the plain model's,
the asynchronous weights against PipeDream's rule computed in one process. The delayed link is table 3's for a
processor 240 times as slow as its device (20 GFLOP/s): 40 MB/s and 2.4 ms, one message of a direction at a time.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks.common import Row, parser, report
from gpipe_cli.benchmarks.tables.emulated import Link, LinkTransport
from gpipe_cli.benchmarks.tables.steps import CPU, cpu_transport, engine_step, make_cell, plain_step
from gpipe_cli.benchmarks.tables.timing import StopWatch
from gpipe_cli.benchmarks.tables.workers import run_workers
from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.pipeline.cell import build_layer

PROCESSES, WIDTH, VOCABULARY = 2, 128, 1000
SIZES: dict[str, Any] = {"L": 4, "H": 512, "A": 2, "d_model": WIDTH, "vocabulary": VOCABULARY}
SIZES |= {"dropout": 0.0, "attention_dropout": 0.0}
FAST, DELAYED = (math.inf, 0.0), (40e6, 0.0024)  # bytes a second, seconds of latency
EXAMPLES, TOKENS, RATE = 32, 24, 0.2  # of a mini-batch; of an example; of SGD, for the mean loss of a token
KINDS = ("plain", "engine", "tensor-sliced", "asynchronous")
COLUMNS = {"how": "", "bytes sent a step": ",d", "bytes of weights": ",d"}
COLUMNS |= {"s a step": ".3f", "s, delayed": ".3f", "steps": "d", "loss": ".4f", "differs from its rule by": ".1e"}


# -- model and data ----------------------------------------------------------------------------------------------------


def build() -> nn.Sequential:
    return nn.Sequential(*(build_layer(of, place, 0, CPU) for place, of in enumerate(transformer_lm(**SIZES))))


def mini_batch(step: int, M: int) -> list[MicroBatch]:
    """Returns micro-batches of a made-up language, in which each token has four successors."""
    made = torch.Generator().manual_seed(step)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=torch.Generator().manual_seed(-1))
    tokens = [torch.randint(VOCABULARY, (EXAMPLES,), generator=made)]
    for _ in range(TOKENS):
        tokens.append(successors[tokens[-1], torch.randint(4, (EXAMPLES,), generator=made)])
    texts = torch.stack(tokens, 1)
    return [((part[:, :-1],), (part[:, 1:],)) for part in texts.tensor_split(M)]


def loss_of(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
    """Returns the sum over tokens, as a share of the mini-batch's mean, and no statistics."""
    logits, wanted = outputs[0].flatten(0, 1), targets[0].flatten()
    return F.cross_entropy(logits, wanted, reduction="sum") / (EXAMPLES * TOKENS), torch.zeros(0, dtype=torch.float64)


# -- links -------------------------------------------------------------------------------------------------------------


class Wire:
    """Counts the bytes that this process sends; a message arrives latency + bytes / bandwidth later."""

    def __init__(self, bandwidth: float, latency: float) -> None:
        self.bandwidth, self.latency, self.sent = bandwidth, latency, 0
        self._free: dict[int, float] = {}
        self.leaving: list[Any] = []

    def send(self, tensor: Tensor, to: int) -> None:
        self.sent += tensor.nbytes
        self._free[to] = max(time.time(), self._free.get(to, 0.0)) + tensor.nbytes / self.bandwidth
        arrives = torch.tensor([self._free[to] + self.latency], dtype=torch.float64)
        self.leaving += [dist.isend(part, to) for part in (arrives, tensor.contiguous())]

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        stamp = torch.empty(1, dtype=torch.float64)
        dist.recv(stamp, source)
        dist.recv(tensor, source)
        time.sleep(max(0.0, float(stamp) - time.time()))
        return tensor

    def meet(self, size: float, rounds: int) -> None:
        """Counts the bytes that this process sends in a collective of so many rounds, and waits for their time."""
        self.sent += round(size)
        time.sleep(size / self.bandwidth + rounds * self.latency)


class CountingTransport(LinkTransport):
    """Counts the bytes of the engine's messages on a `Wire`, and delays them as it says."""

    def __init__(self, wire: Wire, placement: tuple[int, ...], size: int) -> None:
        transport = cpu_transport(placement)
        assert transport is not None  # there are several workers
        super().__init__(Link([size / wire.bandwidth] * (len(placement) + 1), wire.latency), transport)
        self._counted = wire

    def send(self, message: Any, tensors: Sequence[Tensor], spec: Any) -> None:
        """Counts and sends."""
        self._counted.sent += sum(tensor.nbytes for tensor in tensors)
        super().send(message, tensors, spec)


# -- tensor-sliced -----------------------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """Multiplies slices of x and of a matrix; an all-reduce adds up the parts, backward gathers the slices of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wire: Wire) -> Tensor:
        K, ctx.wire = dist.get_world_size(), wire
        own = x.chunk(K, -1)[dist.get_rank()]
        ctx.save_for_backward(own, weight)
        y = F.linear(own, weight)
        dist.all_reduce(y)
        wire.meet(2 * (K - 1) / K * y.nbytes, 2 * (K - 1))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        of_x: Tensor | None = None
        own, weight = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            part = gradients[0] @ weight
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, part)
            ctx.wire.meet((len(parts) - 1) * part.nbytes, len(parts) - 1)
            of_x = torch.cat(parts, -1)
        return of_x, gradients[0].flatten(0, 1).T @ own.flatten(0, 1), None


class SlicedLinear(nn.Module):
    """Multiplies by this process's slice of a matrix [outputs, inputs]."""

    def __init__(self, whole: Tensor, bias: Tensor | None, wire: Wire) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.detach().chunk(dist.get_world_size(), 1)[dist.get_rank()].clone())
        self.bias, self.wire = bias, wire

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Product.apply(x, self.weight, self.wire)
        return y if self.bias is None else y + self.bias


class SlicedEmbedding(SlicedLinear):
    """Multiplies one-hot rows by this process's slice of the table; then adds positions."""

    def __init__(self, whole: Any, wire: Wire) -> None:
        super().__init__(whole.weight.T, None, wire)
        whole.weight = nn.Parameter(torch.zeros(1, WIDTH), requires_grad=False)
        self._positions = [whole]  # no part of the module

    def forward(self, ids: Tensor) -> Tensor:
        whole = self._positions[0]
        vectors: Tensor = super().forward(F.one_hot(ids, VOCABULARY).float()) * whole.scale + whole.embed(ids * 0)
        return vectors


def sliced(model: nn.Sequential, wire: Wire) -> nn.Sequential:
    """Replaces each weight matrix of the model by this process's slice."""
    for part in [*model.modules()]:
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, SlicedLinear(child.weight, child.bias, wire))
    model[0] = SlicedEmbedding(model[0], wire)
    return model


# -- asynchronous ------------------------------------------------------------------------------------------------------

Weights = dict[str, Tensor]


class Stage:
    """Runs one stage of PipeDream: a version of the weights for each micro-batch in flight, an update after each."""

    def __init__(self, modules: nn.Sequential, wire: Wire) -> None:
        self.rank, self.last, self.wire = dist.get_rank(), dist.get_world_size() - 1, wire
        self.modules, self.held = modules, 0
        self.weights: Weights = {name: weight.detach() for name, weight in self.modules.named_parameters()}
        self.in_flight = deque[tuple[Weights, Tensor, Tensor]]()

    def run(self, stream: Sequence[MicroBatch]) -> None:
        """Runs forwards and backwards in turn, after as many forwards as there are later stages."""
        ahead = self.last - self.rank
        for place in range(len(stream) + ahead):
            if place < len(stream):
                self.forward(*stream[place])
            if place >= ahead:
                self.backward()
        while self.wire.leaving:
            self.wire.leaving.pop().wait()

    def forward(self, inputs: Tensors, targets: Tensors) -> None:
        version = {name: weight.detach().requires_grad_() for name, weight in self.weights.items()}
        x = inputs[0]
        if self.rank:
            x = self.wire.receive(torch.empty(*x.shape, WIDTH), self.rank - 1).requires_grad_()
        y = functional_call(self.modules, version, (x,))
        if self.rank < self.last:
            self.wire.send(y.detach(), self.rank + 1)
        else:
            y = loss_of((y,), targets)[0]
        self.in_flight.append((version, x, y))
        kept = {tensor.data_ptr(): tensor.nbytes for version, _, _ in self.in_flight for tensor in version.values()}
        self.held = max(self.held, sum(kept.values()))

    def backward(self) -> None:
        version, x, y = self.in_flight.popleft()
        y.backward(None if self.rank == self.last else self.wire.receive(torch.empty_like(y), self.rank + 1))  # type: ignore[no-untyped-call]
        if self.rank:
            self.wire.send(x.grad, self.rank - 1)  # type: ignore[arg-type]
        self.weights = moved(self.weights, version)


def moved(weights: Weights, version: Weights) -> Weights:
    """Returns weights after an update by the gradients of a version of them."""
    return {name: weight - RATE * version[name].grad for name, weight in weights.items()}  # type: ignore[operator]


def by_the_rule(stages: Sequence[nn.Sequential], stream: Sequence[MicroBatch]) -> Weights:
    """Returns the weights by PipeDream's rule: stage s of K computes with those of K - 1 - s updates before."""
    history = [[{name: weight.detach() for name, weight in stage.named_parameters()}] for stage in stages]
    for t, (inputs, targets) in enumerate(stream):
        x, versions = inputs[0], []
        for s, stage in enumerate(stages):
            old = history[s][max(0, t - (len(stages) - 1 - s))]
            versions.append({name: weight.detach().requires_grad_() for name, weight in old.items()})
            x = functional_call(stage, versions[-1], (x,))
        loss_of((x,), targets)[0].backward()  # type: ignore[no-untyped-call]
        for past, version in zip(history, versions, strict=True):
            past.append(moved(past[-1], version))
    return {name: weight for past in history for name, weight in past[-1].items()}


# -- measuring ---------------------------------------------------------------------------------------------------------


class Contender:
    """Trains the model in one of `KINDS`; every process calls each method.

    Attributes:
        held: bytes of weights in this process, at most so far.
    """

    def __init__(self, kind: str, wire: Wire, M: int) -> None:
        self.kind, self.wire, self.rank, self.K = kind, wire, dist.get_rank(), dist.get_world_size()
        self.M = 1 if kind == "tensor-sliced" else M  # a sliced layer keeps all processes busy at once
        model = build()
        self.whole = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        bounds = [len(model) * k // self.K for k in range(self.K + 1)]
        self.parts = [model[first:end] for first, end in pairwise(bounds)]
        self.is_cut = kind in ("engine", "asynchronous")
        self.own = self.parts[self.rank] if self.is_cut else model
        if kind == "tensor-sliced":
            self.own = sliced(model, wire)
        elif kind == "asynchronous":
            self.stage = Stage(self.own, wire)
        elif kind == "engine":
            self.placement = tuple(range(self.K))
            self.transport = CountingTransport(wire, self.placement, EXAMPLES // M * TOKENS * WIDTH * 4)
            self.cell = make_cell(self.rank, [*self.own], bounds[self.rank])
        self.parameters = [weight for weight in self.own.parameters() if weight.requires_grad]
        self.held = sum(weight.nbytes for weight in self.parameters) if kind != "plain" or self.rank == 0 else 0

    def run(self, first: int, steps: int) -> None:
        """Trains on the mini-batches of so many steps."""
        batches = [mini_batch(step, self.M) for step in range(first, first + steps)]
        if self.kind == "asynchronous":
            self.stage.run([micro_batch for batch in batches for micro_batch in batch])
            self.held = max(self.held, self.stage.held)
            return
        for batch in batches if self.kind != "plain" or self.rank == 0 else ():
            if self.kind == "engine":
                engine_step([self.cell], self.placement, self.rank, self.transport, batch, loss=loss_of)()
            else:
                plain_step([*self.own], batch, loss_of)()
            with torch.no_grad():
                for parameter in self.parameters:
                    parameter.sub_(RATE * parameter.grad)  # type: ignore[operator]
                    parameter.grad = None

    def weights(self) -> Weights:
        """Returns the weights of the whole model, by their names in it."""
        own = self.stage.weights if self.kind == "asynchronous" else dict(self.own.named_parameters())
        found: Weights = {name: torch.zeros_like(whole) for name, whole in self.whole.items()}
        for name, whole in found.items():
            if name in own:
                mine = own[name].detach()
                if mine.numel() < whole.numel():  # the embedding's slice is of its transpose
                    (whole.T if name == "0.weight" else whole).chunk(self.K, 1)[self.rank].copy_(mine)
                elif self.is_cut or self.rank == 0:
                    whole.copy_(mine)
            dist.all_reduce(whole)  # all but one process has zeros
        return found


def distance(found: Weights, wanted: Weights, before: Weights) -> float:
    """Returns how far weights are from where they should have moved to, relative to the largest move."""
    moves = [(found[name] - wanted[name], wanted[name] - before[name]) for name in before]
    return max(float(off.abs().max()) for off, _ in moves) / max(float(move.abs().max()) for _, move in moves)


def worker(context: Context, config: dict[str, Any]) -> list[Row]:
    """Checks and measures each kind; ``config``: steps of a round, and rounds."""
    context.init_process_group()
    watch, M, steps = StopWatch(context.rank, context.world_size), 4 * context.world_size, config["steps"]
    wanted, rows = {}, list[Row]()
    wanted["asynchronous"] = by_the_rule(Contender("plain", Wire(*FAST), M).parts, mini_batch(0, M) + mini_batch(1, M))
    for kind in KINDS:
        row: Row = {"how": kind, "steps": 2 + steps * config["rounds"]}
        for column, link in (("s, delayed", DELAYED), ("s a step", FAST)):
            trained = Contender(kind, Wire(*link), M)
            trained.run(0, 2)
            weights = trained.weights()
            off = distance(weights, wanted.setdefault(kind, wanted.get("plain", weights)), trained.whole)
            assert off < 1e-4, f"{kind} differs from its rule by {off}"
            seconds = [watch.time(partial(trained.run, 2 + n * steps, steps)) for n in range(config["rounds"])]
            row[column] = min(seconds) / steps
        facts = torch.tensor([trained.wire.sent // row["steps"], trained.held])
        dist.all_reduce(facts)
        row |= zip(("bytes sent a step", "bytes of weights"), facts.tolist(), strict=True)
        inputs, targets = mini_batch(10**6, 1)[0]
        row["loss"] = float(loss_of((functional_call(build(), trained.weights(), inputs),), targets)[0])
        rows.append({**row, "differs from its rule by": off})
    return rows


def main() -> None:
    options = parser(__doc__).parse_args()
    config = {"steps": 2, "rounds": 1} if options.quick else {"steps": 20, "rounds": 5}
    rows = run_workers("benchmarks.tradeoffs:worker", PROCESSES, config)
    report(COLUMNS, rows, options.output)


if __name__ == "__main__":
    main()
