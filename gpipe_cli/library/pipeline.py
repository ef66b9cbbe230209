"""Defines `Pipeline` for training loops of one's own (docs/library.md)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.files import RunState, choose
from ..checkpoint.layer_state import layer_state, load_layer, names_of_parameters, restore_layer
from ..checkpoint.writer import CheckpointWriter
from ..comparison.at_start import compare_at_start, is_traced, key_of_module, mean_loss, refuse_fewer
from ..comparison.module_itself import Given, example_of, maker_of
from ..config import PipelineConfig
from ..distributed.pipeline import WorkerPipeline
from ..distributed.step_message import BatchShape
from ..distributed.world import join_torchrun
from ..errors import ConfigurationError, Problems
from ..layers import LayerBuilder, name_used_twice, own_name
from ..micro_batch import MicroBatch, Tensors, refuse_unlike_lengths
from ..models.traced.layers import traced_layers
from ..models.traced.module import Call, TracedFrom, copied
from ..partition.cut import Cut, cut_model
from ..pipeline.batchnorm import finish_batchnorm
from ..pipeline.engine import SenderFailed
from ..pipeline.gradients import clip_factor, reduce_over_replicas, scale_gradients, squared_norms
from ..pipeline.step import StepPlan, StepRecord
from ..tasks.base import Task
from ..tasks.own_loss import LossFunctionTask
from ..typed_section import read_values
from .failures import Signals, describe, failed_there

Side: TypeAlias = "Tensor | Tensors"  # inputs or targets
_NOT_OFFERED: dict[str, Any] = {"devices": None, "memory": None, "auto": []}
_NOT_OFFERED |= dict.fromkeys(("sync_batchnorm", "compile", "shard_optimizer"), False)


class Pipeline(WorkerPipeline):
    """Runs a model that is cut into cells, in a loop of one's own; every worker calls a method at the same time.

    After an exception gradients, statistics, modes and random numbers are as before the call, on all workers, which
    all raise it.
    """

    _is_lost = _is_closed = False
    _steps = 0  # that the program will take, for `begin_step`

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        if keywords or len(arguments) != 8:
            raise ConfigurationError("make a pipeline by Pipeline.of(layers, loss, (inputs, targets), K=…, M=…)")
        super().__init__(*arguments)
        self._signals = Signals()
        self._built = self._held()
        self._trained = self._trained_names()

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerBuilder] | nn.Module,
        loss: Callable[[Any, Any], Tensor] | Task,
        example: tuple[Side, Side],
        *,
        K: int,
        M: int,
        schedule: Any = "gpipe",
        remat: Any = "except_last",
        keep: Any = None,
        partition: Any = "auto",
        cost: Any = "flops",
        seed: int = 0,
        device: Any = "auto",
        backend: Any = "auto",
        autocast: torch.dtype | None = None,
        replicas: int = 1,
        steps: int = 0,
        group: dist.ProcessGroup | None = None,
        trust: bool = False,
    ) -> Pipeline:
        """Joins the processes that torchrun has started, cuts the layers and builds this process's cells.

        Args:
            layers: or a module, which is traced and keeps its weights (docs/your-own-model.md).
            loss: (outputs, targets) to the mean over a micro-batch's examples; or a task (docs/your-own-model.md).
            example: inputs and targets of a micro-batch; values matter only where a module is compared with itself.
            K, M, schedule, remat, keep, partition, cost, device, backend, replicas: as keys of `pipeline` (README).
            autocast: the type of torch.autocast, as torch.bfloat16; None: there is none.
            steps: that the program will take, for layers with `begin_step`.
            group: the processes that run it; None: all.
            trust: True if a module may train though it is too large to be compared with its layers.

        Raises:
            ConfigurationError: the layers cannot be cut or run so.
        """
        values = {"K": K, "M": M, "schedule": schedule, "remat": remat, "keep": keep, "partition": partition}
        values |= {"cost": cost, "device": device, "backend": backend}
        values |= {"replicas": replicas, "seed": seed, "steps": steps}
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise ConfigurationError(f"autocast={autocast!r}: only None, torch.bfloat16 or torch.float16")
        checked = _checked({name: list(v) if isinstance(v, tuple) else v for name, v in values.items()})
        seed, steps = checked.pop("seed"), checked.pop("steps")
        if not isinstance(example, Sequence) or len(example) != 2 or not (callable(loss) or isinstance(loss, Task)):
            raise ConfigurationError("Pipeline.of(layers, loss, example): a function or task, and (inputs, targets)")
        micro_batch = _tensors(example[0], "example[0], the inputs,"), _tensors(example[1], "example[1], the targets,")
        refuse_unlike_lengths(*micro_batch)
        traced_as = (micro_batch[0], seed, autocast, trust)
        builders = traced(layers, *traced_as) if isinstance(layers, nn.Module) else _listed(layers)
        world = join_torchrun(replicas, device, backend, group)
        config = PipelineConfig(**checked, **_NOT_OFFERED, workers=world.workers, threads=torch.get_num_threads())
        task = loss if isinstance(loss, Task) else LossFunctionTask(loss)
        agreed = world.broadcast(partial(_agreed_or_refusal, builders, config, world.workers, micro_batch, task))
        if isinstance(agreed, str):
            raise ConfigurationError(agreed)
        if isinstance(layers, nn.Module):
            share(builders, layers)
        shape, context = BatchShape.of(micro_batch), _context_of(autocast, world.device)
        made = cls(builders, Cut.from_json(agreed[0]), config, task, shape, world, seed, context)
        for cell in made.cells:
            cell.guard_buffers()
        refuse_fewer(made.layers, *agreed[1])
        made._steps, made.engine.frees_peers = steps, True
        return made

    def close(self) -> None:
        """Ends the messages of this pipeline and frees its process groups; all workers call it at the same time.

        The default group of torch.distributed stays: other pipelines may use it.
        """
        world, self._is_lost = self.world, True
        groups = {world.all_ranks, world.replica_group, *(world.message_groups or ())} - {None}
        for group in groups if world.members and not self._is_closed else ():
            dist.destroy_process_group(group)
        self._is_closed = True

    def zero_grad(self) -> None:
        """Takes the gradients from the parameters."""
        for parameter in self.parameters():
            parameter.grad = None

    def train(self, mode: bool = True) -> None:
        """Sets the mode in which `step` runs; parts that were built in evaluation mode stay in it."""
        for cell in self.cells:
            cell.train(mode)

    def eval(self) -> None:
        """Makes `step` run in evaluation mode, without dropout; `forward` always does."""
        self.train(False)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales the gradients of all workers so that their norm together is at most ``max_norm``; returns the norm.

        The norm has the same bits for every K.
        """
        self.message.write_result(StepRecord(), squared_norms(self.parameters()), ())
        with self._together():
            self.message.run()
            norm = self.message.read_result(total_weight=0.0).gradient_norm
            scale_gradients(self.parameters(), clip_factor(norm, max_norm))
        return norm

    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None, keep: int = 2) -> None:
        """Writes a checkpoint of the step, one file a layer, which `load` reads at any K.

        Args:
            folder: on a file system that all workers share.
            optimizer: whose state is saved too.
            keep: how many checkpoints stay in the folder.

        Raises:
            DiskError: it cannot be written.
        """
        model = names_of_parameters(self.layers, self.world.gather_from_workers)
        writer = CheckpointWriter(Path(folder), self.world.rank, model, keep, self.world.device.type)
        with self._together(), self._meeting():
            Path(folder).mkdir(parents=True, exist_ok=True)
            if self.world.replica == 0:
                layers = {x.name: layer_state(x.module, optimizer, None, x.tied) for x in self.layers}
                writer.begin(self.steps_done, layers)
                writer.wait()
        with self._together(), self._meeting():
            if self.world.rank == 0:
                writer.commit(self.steps_done, RunState(), self.world.workers)
                writer.wait()

    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Continues where the newest checkpoint of a folder was written, at any K: weights, `steps_done`, optimizer.

        Raises:
            CheckpointError: there is none, or it is of another model.
        """
        with self._together(), self._meeting():
            info, _ = choose(Path(folder))
            for layer in self.layers:
                restore_layer(layer.name, layer.module, optimizer, load_layer(info, layer.name))
            self.steps_done, self.forwards = info.step, 0

    def step(self, inputs: Side | None = None, targets: Side | None = None) -> float:
        """Runs forward and backward of a mini-batch, and adds its gradients to the parameters' ``.grad``.

        Args:
            inputs, targets: tensors whose first dimension counts examples; only those of rank 0 are used, with replicas
                those of each one's first worker: its own part of the mini-batch.

        Returns:
            the mean loss of the mini-batch, the same bits on every worker and for every K.
        """
        own = [*self.parameters(), *self.ties.users]
        gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in own]
        with self._together(partial(_put_back, own, gradients)):
            plan = self._plan(inputs, targets, "train")
            record, replicas = StepRecord(), self.world.replica_group
            if replicas is not None:  # whose sum has the gradients of this step alone
                _put_back(own, [None] * len(own))
            with self._meeting():
                try:
                    record = self.train_step(plan, timed=False)
                finally:
                    self.unused.fill(self.parameters())
                    self.unused.owners = self.ties.add_gradients()
                    # The norm is not asked for here, nor statistics.
                    self.message.write_result(StepRecord(record.losses), squared_norms([]), self.unused.used())
            if replicas is not None:
                reduce_over_replicas(self.parameters(), replicas)
            self.unused.clear(self.message.read_used)
            if replicas is not None:
                _add(own, gradients)
            finish_batchnorm([batchnorm for cell in self.cells for batchnorm in cell.batchnorms], replicas)
            self.steps_done, self.forwards = self.steps_done + 1, 0
        return self.message.read_result(plan.total_weight).loss

    def forward(self, inputs: Side | None = None, targets: Side | None = None) -> list[MicroBatch]:
        """Runs a mini-batch forward in evaluation mode, without a graph; arguments as of `step`.

        Returns:
            (outputs, targets) of each micro-batch on the worker of the last cell; nothing elsewhere.
        """
        found: dict[int, MicroBatch] = {}

        def keep(micro_batch: int, outputs: Tensors, targets: Tensors) -> None:
            found[micro_batch] = outputs, targets

        with self._together(), self.evaluating():
            plan = self._plan(inputs, targets, "evaluate")
            with self._meeting():
                self.run_forward(plan.signatures, plan.micro_batches, keep)
        return [found[number] for number in sorted(found)]

    def state_dict(self) -> dict[str, Tensor]:
        """Returns weights and buffers of this worker's layers, by their names in the whole model."""
        with self._signals.held_back():
            self.ties.spread()
        return {
            own_name(layer.name, name): value
            for layer in self.layers
            for name, value in layer.module.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes this worker's weights and buffers from a state_dict of the whole model, or of these layers.

        Raises:
            KeyError: one of them is missing.
        """
        for layer in self.layers:
            own = {name: state[own_name(layer.name, name)] for name in layer.module.state_dict()}
            layer.module.load_state_dict(own)

    @contextmanager
    def _together(self, put_back: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Leaves everything as it was before where the context fails, which it does on all workers if on one.

        Raises:
            RuntimeError: an earlier call was broken off between two messages, for which others may still wait.
        """
        if self._is_lost:
            raise RuntimeError(
                "this pipeline cannot go on: it was closed, or an earlier call was broken off while messages were on "
                "their way, and its workers are not at the same place. End all processes; start from a checkpoint"
            )
        with self._signals.held_back() if self.world.size > 1 else nullcontext():
            self._is_lost = self.world.size > 1
            try:
                yield
            except BaseException:
                self.unused.clear(self.message.read_used)
                put_back()
                self.engine.forget_failure()
                raise
            self._is_lost = False

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Runs the exchange behind the context; every worker raises where one has failed there.

        It is the first failure, or on another worker one of the same class.
        """
        failure: BaseException | None = None
        try:
            yield
            self._signals.let_through()  # no message is on its way
        except BaseException as error:
            failure = error
        self.message.write_flag("failed", failure is not None)
        self.message.run()
        if "failed" not in self.message.flags:
            return
        order = isinstance(failure, SenderFailed), self.engine.failed_at  # others may fail on zeros, or nothing, later
        facts = None if failure is None else (order, self.world.rank, describe(failure))
        _, rank, described = min(one for one in self.world.all_gather(facts) if one is not None)
        self._is_lost = False
        if failure is not None and rank == self.world.rank:
            raise failure
        raise failed_there(rank, described) from failure

    def _plan(self, inputs: Side | None, targets: Side | None, kind: str) -> StepPlan:
        """Returns the plan of a mini-batch, on every worker, whose tied parameters agree then."""
        self.ties.spread()  # the owners' values after the optimizer's step
        micro_batches, trained = None, self._trained_names()
        self.message.write_flag("trains others", trained != self._trained)
        with self._meeting():
            self._refuse_changes()
            if self.world.reads_data:
                micro_batches = self._divided(inputs, targets)
                self.write_plan(micro_batches)
        if "trains others" in self.message.flags:
            self.engine.describe_anew()
            self.ties.freeze_with_owners({name for own in self.world.all_gather(sorted(trained)) for name in own})
        self._trained = trained
        plan = self.message.read_plan(kind)
        return replace(plan, micro_batches=micro_batches, step=self.steps_done, steps=self._steps)

    def _held(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that this process's layers hold now, by full name; a tied one in every layer."""
        return {
            own_name(layer.name, name): parameter
            for layer in self.layers
            for name, parameter in layer.module.named_parameters(remove_duplicate=False)
        }

    def _trained_names(self) -> set[str]:
        """Returns the full names of this process's parameters that require a gradient; of a tied one its owner's."""
        return {name for cell in self.cells for name, p in cell.parameters() if p.requires_grad}

    def _refuse_changes(self) -> None:
        """Raises ConfigurationError for what the built layers cannot follow."""
        held = self._held()
        if other := [n for n in {**self._built, **held} if held.get(n) is not self._built.get(n)]:
            raise ConfigurationError(
                f"the parameters {', '.join(other[:3])} were added, taken away or replaced since it was made: "
                "make the pipeline anew by Pipeline.of; values alone are changed by load_state_dict"
            )
        if hooked := self.ties.hooked:
            raise ConfigurationError(
                f"{hooked[0]} is used by several layers, each with a gradient of its own, so its hook would not "
                "get their sum: change .grad after step(), before the optimizer's step"
            )

    def _divided(self, inputs: Side | None, targets: Side | None) -> list[MicroBatch]:
        """Returns the micro-batches of a mini-batch.

        Raises:
            ConfigurationError: the arguments are not tensors, have no examples, or unlike numbers of them.
        """
        sides = [_tensors(side, name) for side, name in ((inputs, "inputs"), (targets, "targets"))]
        refuse_unlike_lengths(*sides)
        if not (M := min(self.M, len(sides[0][0]))):
            raise ConfigurationError("the mini-batch has no examples")
        pieces = [zip(*(tensor.tensor_split(M) for tensor in side), strict=True) for side in sides]
        return list(zip(*pieces, strict=True))


def traced(
    module: nn.Module, inputs: Tensors, seed: int, autocast: torch.dtype | None, trust: bool
) -> list[LayerBuilder]:
    """Returns the layers of a module, which have its weights and their names."""
    dtype = None if autocast is None else str(autocast).removeprefix("torch.")
    of = TracedFrom(partial(copied, module), Call(mean=None), seed, dtype, trust)
    return traced_layers(of, example_of(inputs), torch.float32)


def share(builders: Sequence[LayerBuilder], module: nn.Module) -> None:
    """Makes the layers that this process builds hold the module's own parameters and buffers."""
    maker_of(builders[0]).share_with(module)
    if not module.training:
        warnings.warn(
            "the module is in evaluation mode, and step() runs it so, without dropout: call model.train() before "
            "Pipeline.of to train it as usual",
            stacklevel=3,
        )


def _agreed_or_refusal(
    builders: Sequence[LayerBuilder], config: PipelineConfig, workers: int, micro_batch: MicroBatch, task: Task
) -> tuple[dict[str, Any], list[int]] | str:
    """Returns the cut, and the fewest examples of a micro-batch; or why a worker refuses: then all workers raise.

    A traced module is compared with itself first, as gpipe-train does at a start.
    """
    try:
        cut, fewest = asdict(cut_model(builders, config, workers, micro_batch)), [1, 1]
        if is_traced(builders):
            given = Given([micro_batch], mean_loss(task), lambda named: torch.optim.SGD([p for _, p in named], 0.01))
            fewest = compare_at_start(builders, given, key_of_module(builders), lambda _: None)
        return cut, fewest
    except ConfigurationError as error:
        return str(error)


def _listed(layers: object) -> Sequence[LayerBuilder]:
    """Returns the layers.

    Raises:
        ConfigurationError: they are no list of layers, or two have one name.
    """
    if not isinstance(layers, Sequence) or not layers or not all(isinstance(one, LayerBuilder) for one in layers):
        raise ConfigurationError(
            "layers are a module, which is traced, or a list of LayerBuilder(name, build), where build() makes a "
            f"module, but are a {type(layers).__name__}"
        )
    for layer in layers:
        if isinstance(layer.build, nn.Module) or not callable(layer.build):
            kind = type(layer.build).__name__
            raise ConfigurationError(
                f"LayerBuilder({layer.name!r}, build): build makes the module when it is called, as "
                f"functools.partial({kind}, …), but is a {kind}"
            )
    if (twice := name_used_twice(layers)) is not None:
        raise ConfigurationError(f"there are two layers named {twice!r}: rename one")
    return layers


def _context_of(autocast: torch.dtype | None, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Returns the maker of the context of a forward: autocast without its cache, as the engine keeps casts."""
    return nullcontext if autocast is None else partial(torch.autocast, device.type, autocast, cache_enabled=False)


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of `Pipeline.of` that have passed the checks of the keys of ``pipeline``.

    Raises:
        ConfigurationError: it has a line for each other one.
    """
    problems = Problems()
    hints = get_type_hints(PipelineConfig, include_extras=True) | {"seed": int, "steps": int}
    checked = read_values(hints, values, "", problems)
    problems.refuse()
    return checked


def _tensors(value: Side | None, name: str) -> Tensors:
    """Returns inputs or targets as a tuple.

    Raises:
        ConfigurationError: they are neither a tensor nor some tensors.
    """
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, (tuple, list)) or not value or not all(isinstance(one, Tensor) for one in value):
        found = "None: rank 0 gives them" if value is None else f"a {type(value).__name__}"
        raise ConfigurationError(f"{name} are a tensor, or a tuple of tensors, but are {found}")
    return tuple(value)


def _add(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Adds the gradients of earlier steps."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _put_back(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
