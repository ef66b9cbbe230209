"""Runs one cell: consecutive layers on one device, for one micro-batch at a time (paper, section 2.1: F_k)."""

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ConfigurationError
from ..layers import LayerBuilder, Owner
from ..micro_batch import Tensors
from ..position import Position
from .batchnorm import DeferredBatchNorm, defer_batchnorm
from .buffers import INPUT_CHANGED, BufferChanged, BufferGuard
from .messages.boundary import BoundarySpec, GradientLayouts, as_argument, as_tensors, replace_tensors
from .offload import CellState, HostMemory, HostState, StateFile
from .randomness import WEIGHTS, NoiseSource, seeded
from .weight_casts import WeightCasts


class LayerFailed(RuntimeError):
    """Raised when a layer fails; names cell, layer and micro-batch, and has the layer's own exception as its cause.

    It is an exception of the cause's class, too (`failed`), so that ``except torch.OutOfMemoryError`` catches it.
    """

    cause: type[BaseException] | None = None

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return failed, (str(self), self.cause)


def failed(text: str, cause: type[BaseException] | None) -> LayerFailed:
    """Returns a `LayerFailed` that is also of its cause's class, if the classes can be combined.

    Never one that ends a loop, as StopIteration would.
    """
    stops = (StopIteration, StopAsyncIteration, GeneratorExit, LayerFailed)
    if cause is not None and not issubclass(cause, stops):
        with suppress(Exception):  # a class that cannot be combined, or wants other arguments
            names = {"__module__": __name__, "__qualname__": "LayerFailed", "cause": cause}
            kind: Any = type(
                "LayerFailed", (LayerFailed,) if issubclass(LayerFailed, cause) else (LayerFailed, cause), names
            )
            made: LayerFailed = kind(text)
            return made
    return LayerFailed(text)


@dataclass(frozen=True)
class BuiltLayer:
    """Holds a layer of this worker.

    Attributes:
        index: index in the model's list of layers.
        boundary_type: type of the floating-point tensors that it passes on; None: as it returns them.
        tied: parameters that an earlier layer owns, by all their names there (`tied_parameters.py`).
        may_vary: no cut can lie behind it, so what it passes on may have shapes that depend on values.
    """

    index: int
    name: str
    module: nn.Module
    boundary_type: torch.dtype | None = None
    tied: Mapping[str, Owner] = field(default_factory=dict)
    may_vary: bool = False


def build_layer(builder: LayerBuilder, index: int, seed: int, device: torch.device) -> nn.Module:
    """Builds layer number ``index``: weights are drawn on the CPU, equal for every kind of device, then moved."""
    with seeded(WEIGHTS, seed, index):
        return builder.made().to(device)


MOST_VARIANTS = 4096  # of one layer: by shapes, by types, with and without a graph
BEYOND_A_TABLE = "index out of range in self"  # torch says of nn.Embedding


@dataclass(frozen=True)
class Call:
    """Says how a layer is called in training.

    Attributes:
        forward: called with the layer's argument; returns its outputs.
        auxiliary_loss: the layer's method of this name; None if it has none.
        is_fixed: the layer promises to behave alike in all micro-batches (`graph_varies = False`).
    """

    layer: BuiltLayer
    forward: Callable[..., Any]
    auxiliary_loss: Callable[..., Tensor] | None
    is_fixed: bool


class Cell:
    """Holds the layers of one cell and runs them.

    What the host does between two layers (seeds, layouts, checks of shapes) takes as long as a small kernel. So a layer
    that promises to behave alike in all micro-batches is spared what the first of them have shown to be needless.

    Args:
        number: number of the cell among the K.
        layers: its layers, in order.
        noise: seeds each layer's dropout.
        sync_batchnorm: group of the replicas that share BatchNorm's training statistics; None: each has its own.
        compiled: True to compile the layers.

    Attributes:
        where: place that the cell keeps up to date with the layer that runs, for error reports; the engine's own.
        state: the parameters in a file or in the host's memory, if the cell is offloaded; else None.
    """

    state: CellState | None = None

    def __init__(
        self,
        number: int,
        layers: Sequence[BuiltLayer],
        noise: NoiseSource,
        sync_batchnorm: dist.ProcessGroup | None = None,
        compiled: bool = False,
    ) -> None:
        self.number = number
        self.layers = [replace(layer, module=defer_batchnorm(layer.module, sync_batchnorm)) for layer in layers]
        self._compiled = [layer.name for layer in self.layers if compiled and compile_layer(layer.module)]
        self.noise = noise
        self._layouts = GradientLayouts()
        self._forms: dict[Hashable, BoundarySpec] = {}  # by (layer, signature): the outputs that it passes on
        # By (signature, whether with a graph): indices of layers whose outputs need neither checks nor other layouts.
        self._unchanged: dict[tuple[Hashable, bool], set[int]] = {}
        # Fixed layers that drew no random number in the step's first micro-batch; None before it.
        self._silent: set[int] | None = None
        self._gathers = True  # whether the BatchNorms gather statistics now
        modules = list(dict.fromkeys(module for layer in self.layers for module in layer.module.modules()))
        self._built_in_evaluation = [module for module in modules if not module.training]
        self.batchnorms = [module for module in modules if isinstance(module, DeferredBatchNorm)]
        self._indices = [layer.index for layer in self.layers]
        self.where = Position()
        self._calls = [self._call_of(layer) for layer in self.layers]
        self.graph_varies = not all(call.is_fixed for call in self._calls)
        self._casts: WeightCasts | None = None  # made when layers first run under autocast
        self._step_aware: list[Any] = [module for module in modules if hasattr(module, "begin_step")]
        self._is_guarded = False

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns (full name, parameter) of every parameter in layer order; ``encoder.0.attention.query.weight``.

        A tied parameter is listed by its owner: it has one update.
        """
        return [
            (f"{layer.name}.{name}", parameter)
            for layer in self.layers
            for name, parameter in layer.module.named_parameters()
            if name not in layer.tied
        ]

    @property
    def is_trained(self) -> bool:
        """Returns whether a parameter of the cell takes a gradient."""
        return any(parameter.requires_grad for layer in self.layers for parameter in layer.module.parameters())

    def train(self, training: bool) -> None:
        """Sets the mode of the layers; in training, parts that were built in evaluation mode stay in it."""
        for layer in self.layers:
            layer.module.train(training)
        for module in self._built_in_evaluation:
            module.training = False

    def guard_buffers(self) -> None:
        """Makes the next `run_training` refuse a layer whose forward changes its buffers."""
        self._is_guarded = True

    def describe_anew(self) -> None:
        """Forgets which outputs need no checks, because parameters were frozen or freed."""
        self._unchanged.clear()

    def begin_step(self, step: int, steps: int) -> None:
        """Calls ``begin_step`` of the layers that have it (drop-path schedules)."""
        for module in self._step_aware:
            module.begin_step(step, steps)
        self._silent = None

    def offload(self, memory: StateFile | HostMemory, tied: Container[str]) -> None:
        """Moves the cell's parameters to a file or to the host's memory, where gradients and optimizer state follow.

        Args:
            tied: full names of parameters that other layers use too; they stay on a GPU.
        """
        if isinstance(memory, StateFile):
            self.state = CellState(memory, [parameter for _, parameter in self.parameters()])
        else:
            own = [parameter for name, parameter in self.parameters() if name not in tied]
            self.state = HostState(memory, own, self.number)
        self.take_away()

    def take_away(self) -> None:
        """Gives the memory of an offloaded cell back."""
        if self.state is not None:
            self.end_step()
            self.state.take_away()

    def end_step(self) -> None:
        """Frees the casts, which live for one step."""
        if self._casts is not None:
            self._casts.forget()

    def weights_cast(self, device: torch.device) -> AbstractContextManager[None]:
        """Returns the context in which layers under autocast use weights that are cast once in a step."""
        if self._compiled or not torch.is_autocast_enabled(device.type):  # compiled layers cast within kernels
            return nullcontext()
        if self._casts is None:
            self._casts = WeightCasts([layer.module for layer in self.layers], alike=not self.graph_varies)
        return self._casts.used()

    def run_training(
        self, inputs: Tensors, targets: Tensors, step: int, micro_batch: int, signature: Hashable, first_time: bool
    ) -> tuple[Tensors, dict[int, Tensor]]:
        """Runs F_k for one micro-batch, with the noise that belongs to it.

        Args:
            inputs: the boundary in front of the cell.
            targets: the micro-batch's targets, for layers with an ``auxiliary_loss``.
            step, micro_batch: numbers that seed the noise.
            signature: shapes and types of the micro-batch that entered the pipeline.
            first_time: False for a recompute, in which BatchNorm gathers no statistics.

        Returns:
            The outputs of the last layer, and the auxiliary losses by the index of their layer.

        Raises:
            LayerFailed: an exception in a layer.
            BufferChanged: a layer changes the cell's input, or after `guard_buffers` a buffer or its own input.
        """
        versions = [tensor._version for tensor in inputs]
        self._set_gathering(first_time)
        values, auxiliary = inputs, dict[int, Tensor]()
        is_first, silent, has_graph = self._silent is None, self._silent or set(), torch.is_grad_enabled()
        unchanged = self._unchanged.setdefault((signature, has_graph), set())
        seeds = self.noise.seeds(step, micro_batch, self._indices)
        for number, (call, seed) in enumerate(zip(self._calls, seeds, strict=True)):
            layer, index, forward = call.layer, call.layer.index, call.forward
            self.where.layer = layer.name
            if self._is_guarded:
                forward = BufferGuard(layer.name, layer.module, forward)
            if index not in silent:
                self.noise.seed(seed)
            before = self.noise.moment() if is_first and call.is_fixed else None  # to see whether the layer draws
            try:
                outputs = forward(as_argument(values))
                if call.auxiliary_loss is not None:
                    auxiliary[index] = call.auxiliary_loss(outputs, targets)
                if before is not None and before == self.noise.moment():
                    silent.add(index)
                made = as_tensors(outputs)
                if has_graph and index not in silent:
                    self.noise.seed_backward(seed, (*made, auxiliary.get(index)), values)
                if index not in unchanged:
                    made, is_settled = self._layouts.settle(made, values, layer.boundary_type, index, signature)
                    if not (call.is_fixed or layer.may_vary):
                        self._refuse_other_form(number, micro_batch, made, signature)
                    elif is_settled and call.is_fixed:
                        unchanged.add(index)
                values = made
            except (BufferChanged, LayerFailed):
                raise
            except Exception as error:
                raise self._failure(layer, micro_batch, error) from error
        self.where.layer = None
        self._is_guarded, self._silent = False, silent
        if [tensor._version for tensor in inputs] != versions:  # in some micro-batches alone
            raise BufferChanged(
                f"cell {self.number}, micro-batch {micro_batch}: a layer changes {', '.join(INPUT_CHANGED)}"
            )
        return values, auxiliary

    def _set_gathering(self, gathers: bool) -> None:
        """Sets whether the BatchNorms gather statistics."""
        if gathers != self._gathers:
            self._gathers = gathers
            for batchnorm in self.batchnorms:
                batchnorm.gathering = gathers

    def run_inference(
        self, inputs: Tensors, number: Sequence[int], micro_batch: int, caches: list[dict[str, Any]] | None
    ) -> Tensors:
        """Runs F_k for one micro-batch without a graph, and returns the outputs of the last layer.

        Args:
            inputs: the boundary in front of the cell.
            number, micro_batch: numbers that seed layers that draw noise in evaluation, too.
            caches: a dict for each layer, for one incremental call of generation; None: evaluation.
        """
        values = inputs
        seeds = self.noise.evaluation_seeds(number, micro_batch, self._indices)
        for position, (layer, seed) in enumerate(zip(self.layers, seeds, strict=True)):
            argument = as_argument(values)
            decode: Any = getattr(layer.module, "decode", None)
            self.where.layer = layer.name
            self.noise.seed(seed)
            try:
                if caches is None or decode is None:
                    outputs = layer.module(argument)
                else:
                    outputs = decode(argument, caches[position])
                values, _ = self._layouts.settle(as_tensors(outputs), values, layer.boundary_type, layer.index, None)
            except Exception as error:
                raise self._failure(layer, micro_batch, error) from error
        return values

    @contextmanager
    def going_backward(self, micro_batch: int) -> Iterator[None]:
        """Turns an exception of autograd inside the context into a `LayerFailed` that names the cell's layers."""
        try:
            yield
        except Exception as error:
            first, last = self.layers[0].name, self.layers[-1].name
            named = f"layer {first!r}" if first == last else f"layers {first!r} to {last!r}"
            text = f"cell {self.number}, backward of {named}, micro-batch {micro_batch}"
            raise failed(text, type(error)) from error

    def _call_of(self, layer: BuiltLayer) -> Call:
        """Returns how to call a layer so that it gives the same bits without a graph as with one.

        oneDNN's LSTM computes in another order without a graph, and a compiled layer is then compiled in another way.
        Such layers always build a graph.
        """
        own = layer.name in self._compiled or any(isinstance(inner, nn.LSTM) for inner in layer.module.modules())
        forward = _with_graph(layer.module) if own else layer.module
        is_fixed = not getattr(layer.module, "graph_varies", True)
        return Call(layer, forward, getattr(layer.module, "auxiliary_loss", None), is_fixed)

    def _failure(self, layer: BuiltLayer, micro_batch: int, error: Exception) -> Exception:
        """Returns the exception to raise for an ``error`` in a layer; it names the layer and the micro-batch."""
        if isinstance(error, IndexError) and BEYOND_A_TABLE in str(error):
            return ConfigurationError(
                f"layer {layer.name!r} looks up an index beyond the end of its table (nn.Embedding): the data have "
                "more tokens, or longer sequences, than it has rows. Enlarge the table, or lower data.vocabulary or "
                "data.sequence_length"
            )
        return failed(f"cell {self.number}, layer {layer.name!r}, micro-batch {micro_batch}", type(error))

    def _refuse_other_form(self, number: int, micro_batch: int, made: Tensors, signature: Hashable) -> None:
        """Raises LayerFailed for outputs of another form than before, at every K: a cut may lie behind any layer.

        Args:
            number: index of the layer in the cell.
            made: its outputs.
            signature: shapes and types of the micro-batch that entered the pipeline.
        """
        key = self.layers[number].index, signature
        if (form := self._forms.get(key)) is None:
            form = self._forms[key] = BoundarySpec.of(made)
        if not form.fits(made):
            raise self.other_form(number, micro_batch, made, form)

    def other_form(self, number: int, micro_batch: int, made: Tensors, before: BoundarySpec) -> LayerFailed:
        """Returns the error of a layer whose outputs have another form than before, for which messages are laid out.

        Args:
            number: index of the layer in the cell.
            made: its outputs.
            before: the form of its earlier outputs, from inputs of the same shapes and types.
        """
        return LayerFailed(
            f"cell {self.number}, layer {self.layers[number].name!r}, micro-batch {micro_batch}: it passes on "
            f"{BoundarySpec.of(made)}, where inputs of the same shapes and types gave {before} before. What passes to "
            "the next layer may depend on shapes and types of the inputs, not on their values: pad it, or make one "
            "layer of those between which it varies"
        )


def _with_graph(module: nn.Module) -> Callable[..., Any]:
    """Returns a forward of the layer that always builds a graph, and drops it outside gradient mode."""

    def forward(argument: Any) -> Any:
        if torch.is_grad_enabled():
            return module(argument)
        with torch.enable_grad():
            return replace_tensors(module(argument), Tensor.detach)

    return forward


def compile_layer(module: nn.Module) -> bool:
    """Compiles the forward of a layer, for each shape anew; parameters keep their names.

    Returns:
        False where it stays as it is: a layer with `begin_step` would be compiled again in every step.
    """
    if any(hasattr(inner, "begin_step") for inner in module.modules()):
        return False
    config: Any = torch._dynamo.config
    # A kernel for varying shapes would depend on the shapes that came first, and so on where a run was resumed. For the
    # same reason too many variants are an error: torch would go on without compiling.
    config.recompile_limit = config.accumulated_recompile_limit = MOST_VARIANTS
    config.fail_on_recompile_limit_hit = True
    # Else Inductor times whether padding makes a product of matrices faster, and takes what was faster this time.
    torch._inductor.config.deterministic |= torch.are_deterministic_algorithms_enabled()
    # The attribute, not the module: its hooks run around it, and the names of its parameters stay.
    layer: Any = module
    layer.forward = torch.compile(module.forward, dynamic=False)
    return True
