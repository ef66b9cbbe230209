"""Defines `Pipeline` for training loops of one's own (docs/library.md)."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..checkpoint.files import RunState, find
from ..checkpoint.layer_state import layer_state, load_layer, restore_layer
from ..checkpoint.writer import CheckpointWriter
from ..comparison.at_start import compare_at_start, is_traced, mean_loss, refuse_fewer
from ..comparison.module_itself import Given, maker_of
from ..config import PipelineConfig
from ..distributed.pipeline import WorkerPipeline
from ..distributed.step_message import BatchShape, refuse_unlike_lengths
from ..distributed.world import join_torchrun
from ..errors import ConfigurationError
from ..layers import AGAIN, LayerBuilder, checked_layers, own_name
from ..micro_batch import MicroBatch, Tensors
from ..models.traced.layers import traced_layers
from ..models.traced.module import ALL, Call, TracedFrom, autocast_of, copied, example_of
from ..partition.cut import Cut, cut_model
from ..pipeline.batchnorm import finish_batchnorm
from ..pipeline.cell import BuiltLayer
from ..pipeline.engine import SenderFailed
from ..pipeline.gradients import ReplicaSums, clip_factor, copy_from_replica, scale_gradients, squared_norms
from ..pipeline.step import StepPlan, StepRecord
from ..tasks.base import Task
from ..tasks.own_loss import alone
from .arguments import (
    Inputs,
    Side,
    checked,
    one_of,
    refuse_other_lengths,
    refuse_unlike,
    task_of,
    tensors_of,
    without_graphs,
)
from .failures import Signals, describe, failed_there
from .saved import options_of, packed, set_options, unpacked

_NOT_OFFERED: dict[str, Any] = {"worker_devices": None, "memory": None, "auto": []}
_NOT_OFFERED |= {"offload": False, "offload_dir": None, "placement": "pipeline_inside"}
_NOT_OFFERED |= dict.fromkeys(("sync_batchnorm", "compile", "shard_optimizer"), False)


class Pipeline(WorkerPipeline):
    """Runs a model that is cut into cells, in a loop of one's own; every worker calls a method at the same time.

        pipeline = Pipeline.of(model, loss, (inputs, targets), cells=2, micro_batches=4)
        loss = pipeline.step(inputs, targets)  # adds to .grad, as backward() does; then optimizer.step()

    After an exception gradients, statistics, modes and random numbers are as before the call, on all workers, which
    all raise it.
    """

    _is_lost = _is_closed = False

    def __init__(
        self,
        *arguments: Any,
        inputs: Inputs,
        answer: Callable[[Tensors], Any],
        module: nn.Module | None,
        steps: int,
    ) -> None:
        """Builds this process's cells.

        Args:
            arguments: those of `WorkerPipeline`.
            inputs: description of how a program gives inputs.
            answer: function that makes what the model returns of its output tensors.
            module: the module whose weights the layers share; None: the layers have their own.
            steps: number of steps that the program will take, for `begin_step`.
        """
        super().__init__(*arguments)
        self._inputs, self._answer, self._module, self._steps = inputs, answer, module, steps
        self._signals = Signals()
        self._built = self._present_parameters()
        self._trained = self._trained_names()
        self._nothing = nn.Parameter(torch.empty(0, device=self.world.device))
        self.engine.frees_peers = True
        for cell in self.cells:
            cell.guard_buffers()
        if self.world.workers > 1:
            own = {id(parameter) for parameter in self.parameters()}
            weakref.finalize(self, register_optimizer_step_pre_hook(partial(_refuse_joint, own)).remove)

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerBuilder] | nn.Module,
        loss: Callable[[Any, Any], Tensor] | Task,
        example: tuple[Side, Side],
        *,
        K: int | None = None,
        M: int | None = None,
        cells: int | None = None,
        micro_batches: int | None = None,
        weight: Callable[[Any], Any] | None = None,
        shared: Sequence[str] = (),
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
        """Joins the processes that torchrun or srun has started, cuts the layers and builds this process's cells.

        Args:
            layers: list of layer builders, or a module, which is traced and shares its weights.
            loss: function (outputs, targets) that returns the mean over a micro-batch's examples; or a task.
            example: inputs and targets of a micro-batch; values matter only where a module is compared with itself.
            cells, micro_batches: other names of K and M.
            weight: function (targets) that returns the number over which ``loss`` is a mean, as tokens; None: examples.
            shared: names of inputs, given as {name: tensor}, that are the same for all micro-batches.
            K, M, schedule, remat, keep, partition, cost, device, backend, replicas: values of the keys of `pipeline`
                (README).
            autocast: the type of torch.autocast, as torch.bfloat16; None: there is none.
            steps: number of steps that the program will take, for layers with `begin_step`.
            group: the processes that run it; None: all.
            trust: True if a module may train though it is too large to be compared with its layers.

        Raises:
            ConfigurationError: the layers cannot be cut or run so.
        """
        K, M = one_of("K", K, "cells", cells), one_of("M", M, "micro_batches", micro_batches)
        values = {"K": K, "M": M, "schedule": schedule, "remat": remat, "keep": keep, "partition": partition}
        values |= {"cost": cost, "device": device, "backend": backend, "replicas": replicas}
        keys = checked(values | {"seed": seed, "steps": steps}, autocast)
        seed, steps = keys.pop("seed"), keys.pop("steps")
        module = layers if isinstance(layers, nn.Module) else None
        given, micro_batch = Inputs.of(example, shared, module is not None)
        cast_to = None if autocast is None else str(autocast).removeprefix("torch.")
        builders, answer = layers_of(layers, given, micro_batch[0], seed, cast_to, trust)
        task = task_of(loss, weight, answer)
        world = join_torchrun(replicas, device, backend, group)
        refuse_unlike(world.all_gather({name: repr(value) for name, value in {**keys, "seed": seed}.items()}))
        config = PipelineConfig(**keys, **_NOT_OFFERED, workers=world.workers, threads=torch.get_num_threads())
        agreed = world.broadcast(partial(_agreed_or_refusal, builders, config, world.workers, micro_batch, task))
        if isinstance(agreed, str):
            raise ConfigurationError(agreed)
        if module is not None:
            share(builders, module)
        shape, context = BatchShape.of(micro_batch), autocast_of(cast_to, world.device.type)
        arguments = builders, Cut.from_json(agreed[0]), config, task, shape, world, seed, context
        made = cls(*arguments, inputs=given, answer=answer, module=module, steps=steps)
        refuse_fewer(made.layers, *agreed[1])
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

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that this process trains; an empty one where it has none, as optimizers want one."""
        return super().parameters() or [self._nothing]

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
        own = super().parameters()
        self.message.write_result(StepRecord(), squared_norms(own), ())
        with self._together():
            self.message.run()
            norm = self.message.gradient_norm
            scale_gradients(own, clip_factor(norm, max_norm))
        return norm

    def save(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        keep: int = 2,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Writes a checkpoint of the step, one file a layer, which `load` reads at any K.

        Args:
            folder: directory on a file system that all workers share.
            optimizer: optimizer whose state is saved too; None: no state is saved.
            keep: number of checkpoints that stay in the folder.
            extra: plain values of rank 0 that `load` will return, such as the state of a scheduler.

        Raises:
            ConfigurationError: ``extra`` holds something else.
            DiskError: the checkpoint cannot be written.
        """
        model = sorted(self.world.gather_from_workers([layer.index, layer.name] for layer in self.layers))
        names = [name for _, name in model]
        writer = CheckpointWriter(Path(folder), self.world.rank, names, keep, self.world.device.type)
        with self._together(), self._meeting():
            kept, own = packed(extra, "extra"), options_of(optimizer, self.named_parameters())
            Path(folder).mkdir(parents=True, exist_ok=True)
            if self.world.replica == 0:
                layers = {x.name: layer_state(x.module, optimizer, None, x.tied) for x in self.layers}
                writer.begin(self.steps_done, layers)
                writer.wait()
        options = [group for of_rank in self.world.gather(own) for group in of_rank]
        with self._together(), self._meeting():
            if self.world.rank == 0:
                state = RunState(schedule={"extra": kept, "options": options})
                writer.commit(self.steps_done, state, self.world.workers)
                writer.wait()

    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Continues where the newest checkpoint of a folder was written, at any K: weights, `steps_done`, optimizer.

        The optimizer's groups get the options that their parameters had, as learning rates.

        Returns:
            ``extra`` of `save`.

        Raises:
            CheckpointError: the folder has no checkpoint, or one of another model.
        """
        with self._together(), self._meeting():
            info, _ = find(Path(folder))
            for layer in self.layers:
                restore_layer(layer.name, layer.module, optimizer, load_layer(info, layer.name))
            self.steps_done, self.forwards = info.step, 0
            kept: Any = info.state.schedule
            if not (isinstance(kept, dict) and {*kept} == {"extra", "options"}):  # of a run, or an earlier release
                return kept
            if optimizer is not None:
                set_options(optimizer, self.named_parameters(), kept["options"])
        return unpacked(kept["extra"])

    def step(self, inputs: Side | None = None, targets: Side | None = None, *, outputs: bool = False) -> Any:
        """Runs forward and backward of a mini-batch, and adds its gradients to the parameters' ``.grad``.

        Args:
            inputs, targets: tensors whose first dimension counts examples; only those of rank 0 are used, with replicas
                those of each one's first worker: its own part of the mini-batch.
            outputs: True to return the pairs of `forward` too.

        Returns:
            The mean loss of the mini-batch, a float of the same bits on every worker and for every K. With ``outputs``
            a tuple of this and the list of pairs.
        """
        weights = super().parameters()
        own, found = [*weights, *self.ties.users], dict[int, MicroBatch]()
        gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in own]
        with self._together(partial(_put_back, own, gradients)):
            plan = self._plan(lambda: self._divided(without_graphs(inputs), targets), "train")
            record, replicas = StepRecord(), self.world.replica_group
            if replicas is not None:  # whose sum has the gradients of this step alone
                _put_back(own, [None] * len(own))
            with self._meeting():
                try:
                    with self._noting(found) if outputs else nullcontext():
                        record = self.train_step(plan, timed=False)
                finally:
                    self.unused.fill(weights)
                    self.unused.owners = self.ties.add_gradients()
                    # The norm is not asked for here, nor statistics.
                    self.message.write_result(StepRecord(record.losses), squared_norms([]), self.unused.used())
            if replicas is not None:
                ReplicaSums(replicas).finish(weights)
            self.unused.clear(self.message.read_used)
            if replicas is not None:
                _add(own, gradients)
            finish_batchnorm([batchnorm for cell in self.cells for batchnorm in cell.batchnorms], replicas)
            self.steps_done, self.forwards = self.steps_done + 1, 0
        loss = self.message.read_result(plan).loss
        return (loss, _in_order(found)) if outputs else loss

    def forward(self, inputs: Side | None = None, targets: Side | None = None) -> list[MicroBatch]:
        """Runs a mini-batch forward in evaluation mode, without a graph; arguments as of `step`.

        Returns:
            (outputs, targets) of each micro-batch on the worker of the last cell; nothing elsewhere.
        """
        return self._forward_only(lambda: self._divided(inputs, targets))

    def predict(self, inputs: Side | None = None) -> Any:
        """Returns the model's outputs for a mini-batch, in evaluation mode, on the CPU of every worker.

        With replicas those of all, one's after another's; a single number comes once for each micro-batch.

        Raises:
            ConfigurationError: the first dimension of an output does not count examples, so parts cannot be joined.
        """
        found = self._forward_only(lambda: self._divided(inputs, self._no_targets(inputs)), refuse_other_lengths)
        by_place = zip(*(outputs for outputs, _ in found), strict=True)
        own = {str(place): torch.cat([*map(torch.atleast_1d, parts)]) for place, parts in enumerate(by_place)}
        by_replica = [outputs.values() for outputs in self._everyones(own) if outputs]
        return self._answer(tuple(map(torch.cat, zip(*by_replica, strict=True))))

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum of a tensor over all workers, in the order of their ranks; all give the same shape."""
        first, *others = [own[""] for own in self._everyones({"": tensor})]
        return sum(others, first).to(tensor.device)

    def state_dict(self, whole: bool = False) -> dict[str, Tensor]:
        """Returns weights and buffers of this worker's layers, by their names in the whole model.

        Args:
            whole: True to return those of all layers, on the CPU of every worker.
        """
        with self._signals.held_back():
            self.ties.spread()
        own = {
            own_name(layer.name, name): value
            for layer in self.layers
            for name, value in layer.module.state_dict().items()
        }
        if not whole:
            return own
        everyones = self._everyones({name: value for name, value in own.items() if AGAIN not in name})
        return {name: value for one in everyones for name, value in one.items()}

    def write_back(self, model: nn.Module) -> None:
        """Copies the weights and buffers of all workers into a module of the same names, as for `save_pretrained`."""
        model.load_state_dict(self.state_dict(whole=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes this worker's weights and buffers from a state_dict of the whole model, or of these layers.

        Raises:
            KeyError: one of them is missing, on some worker, or a name is of no layer; then nothing is loaded.
            ValueError: one has another shape; likewise.
        """
        names = [own_name(layer.name, name) for layer in self.layers for name in layer.module.state_dict()]
        known = {name for of_rank in self.world.all_gather(names) for name in of_rank}
        known |= {*self._module.state_dict()} if self._module is not None else set()
        with self._together():
            with self._meeting():
                if unknown := [name for name in state if name not in known]:
                    raise KeyError(
                        f"{', '.join(unknown[:3])}: names of no layer, such as {', '.join(sorted(known)[:2])}"
                    )
                own = [_given_of(layer, state) for layer in self.layers]
            for layer, tensors in zip(self.layers, own, strict=True):
                layer.module.load_state_dict(tensors)

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

    def _forward_only(
        self, divided: Callable[[], list[MicroBatch]], check: Callable[[Tensors, Tensors], None] = lambda *sides: None
    ) -> list[MicroBatch]:
        """Runs micro-batches forward in evaluation mode; returns as `forward`."""
        found: dict[int, MicroBatch] = {}

        def keep(micro_batch: int, outputs: Tensors, targets: Tensors) -> None:
            check(outputs, targets)
            found[micro_batch] = outputs, targets

        with self._together(), self.evaluating():
            plan = self._plan(divided, "evaluate")
            with self._meeting():
                self.run_forward(plan, keep)
        return _in_order(found)

    @contextmanager
    def _noting(self, found: dict[int, MicroBatch]) -> Iterator[None]:
        """Notes outputs and targets of each micro-batch, without a graph, when its loss is computed in the context."""
        usual = self.engine.loss

        def note(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
            found[self.engine.running.micro_batch] = tuple(tensor.detach() for tensor in outputs), targets
            return usual(outputs, targets)

        self.engine.loss = note
        try:
            yield
        finally:
            self.engine.loss = usual

    def _everyones(self, own: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Returns the named tensors of every worker, in the order of the ranks, on the CPU."""
        kinds = {name: (str(tensor.dtype).removeprefix("torch."), [*tensor.shape]) for name, tensor in own.items()}
        found: list[dict[str, Tensor]] = []
        with self._signals.held_back():
            for rank, named in enumerate(self.world.all_gather(kinds)):
                found.append({})
                for name, (kind, shape) in named.items():
                    tensor = found[-1][name] = torch.empty(shape, dtype=getattr(torch, kind))
                    if rank == self.world.rank:
                        tensor.copy_(own[name].detach())
                    if self.world.all_ranks is not None and tensor.numel():
                        copy_from_replica(tensor.view(-1).view(torch.uint8), rank, self.world.all_ranks)
        return found

    def _plan(self, divided: Callable[[], list[MicroBatch]], kind: str) -> StepPlan:
        """Returns the plan of a mini-batch, on every worker, whose tied parameters agree then.

        Args:
            divided: function that returns the micro-batches; called on the worker that reads data.
        """
        self.ties.spread()  # the owners' values after the optimizer's step
        micro_batches, trained = None, self._trained_names()
        self.message.write_flag("trains others", trained != self._trained)
        with self._meeting():
            self._refuse_changes()
            if self.world.reads_data:
                self.write_plan(micro_batches := divided())
        if "trains others" in self.message.flags:
            self.engine.describe_anew()
            self.ties.freeze_with_owners({name for own in self.world.all_gather(sorted(trained)) for name in own})
        self._trained = trained
        plan = self.message.read_plan(kind)
        return replace(plan, micro_batches=micro_batches, step=self.steps_done, steps=self._steps)

    def _present_parameters(self) -> dict[str, nn.Parameter]:
        """Returns, by name, the parameters that layers hold now (a tied one in every layer), and the user's module.

        Compared with those of the beginning they show which were added, taken away or replaced.
        """
        held = {
            own_name(layer.name, name): parameter
            for layer in self.layers
            for name, parameter in layer.module.named_parameters(remove_duplicate=False)
        }
        module = () if self._module is None else self._module.named_parameters(remove_duplicate=False)
        return held | {f"the module's {name}": parameter for name, parameter in module}

    def _trained_names(self) -> set[str]:
        """Returns the full names of this process's parameters that require a gradient; of a tied one its owner's."""
        return {name for cell in self.cells for name, p in cell.parameters() if p.requires_grad}

    def _refuse_changes(self) -> None:
        """Raises ConfigurationError for what the built layers cannot follow."""
        present = self._present_parameters()
        if other := [n for n in {**self._built, **present} if present.get(n) is not self._built.get(n)]:
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
        sides = self._inputs.tensors(inputs, "inputs"), tensors_of(targets, "targets")
        refuse_unlike_lengths(*sides)
        if not (M := min(self.M, len(sides[0][0]))):
            raise ConfigurationError("the mini-batch has no examples")
        pieces = [zip(*(tensor.tensor_split(M) for tensor in side), strict=True) for side in sides]
        return list(zip(*pieces, strict=True))

    def _no_targets(self, inputs: Side | None) -> Tensors:
        """Returns zeros in place of targets, one a row, for a forward whose loss is not used."""
        examples = len(self._inputs.tensors(inputs, "inputs")[0])
        return tuple(torch.zeros(examples, *[1] * (dimensions - 1)) for dimensions in self.shape.targets)


def layers_of(
    layers: object, given: Inputs, inputs: Tensors, seed: int, autocast: str | None, trust: bool
) -> tuple[Sequence[LayerBuilder], Callable[[Tensors], Any]]:
    """Returns the layers of a list or of a module, and the function that makes the model's answer of its outputs.

    A module is traced; its layers have its weights and their names.

    Raises:
        ConfigurationError: it is neither, or the module cannot be traced.
    """
    if not isinstance(layers, nn.Module):
        return checked_layers(layers, "layers are a module, or"), alone
    call = Call(inputs=given.names or None, output=ALL, mean=None, shared=given.shared)
    traced_from = TracedFrom(partial(copied, layers), call, seed, autocast, trust)
    builders = traced_layers(traced_from, example_of(inputs))
    return builders, maker_of(builders[-1]).trace.answer


def share(builders: Sequence[LayerBuilder], module: nn.Module) -> None:
    """Makes the layers that this process builds hold the module's own parameters and buffers."""
    maker = maker_of(builders[0])
    maker.weights.shared_with = module
    if not module.training:
        warnings.warn(
            "the module is in evaluation mode, and step() runs it so, without dropout: call model.train() before "
            "Pipeline.of to train it as usual",
            stacklevel=3,
        )
    if kept := sorted(maker.trace.kept):
        warnings.warn(
            f"forward keeps tensors in {', '.join(kept[:3])}, which step() does not: a loss that reads them gets old "
            "ones. Return them as further outputs",
            stacklevel=3,
        )
    if hooked := [name for name, part in module.named_modules() if part._forward_hooks]:
        warnings.warn(
            f"{hooked[0] or 'the module'} has a forward hook: what it returns is in the layers, but step() does not "
            "call it, and what it keeps elsewhere gets no values. Return that as a further output",
            stacklevel=3,
        )


def _refuse_joint(own: set[int], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raises ConfigurationError before a step of LBFGS on a pipeline's parameters, given by their ids."""
    theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if isinstance(optimizer, torch.optim.LBFGS) and own & theirs:
        raise ConfigurationError(
            "LBFGS looks at all parameters together, and this process has only its own: run the loop in one process, "
            "or take an optimizer that updates each parameter by itself"
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
            fewest = compare_at_start(builders, given, lambda _: None)
        return cut, fewest
    except ConfigurationError as error:
        return str(error)


def _add(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Adds the gradients of earlier steps."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _put_back(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _in_order(found: Mapping[int, MicroBatch]) -> list[MicroBatch]:
    return [found[number] for number in sorted(found)]


def _given_of(layer: BuiltLayer, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a layer from a state_dict, which may hold a tied one under its owner's name alone.

    Raises:
        KeyError: one is missing.
        ValueError: one has another shape.
    """
    own = {}
    for name, tensor in layer.module.state_dict().items():
        full = own_name(layer.name, name)
        if full not in state and name in layer.tied:
            full = own_name(*layer.tied[name])
        if full not in state:
            raise KeyError(f"{full}, which is none of {len(state)} names such as {', '.join([*state][:2])}")
        own[name] = state[full]
        if own[name].shape != tensor.shape:
            raise ValueError(f"{full} has the shape {list(own[name].shape)}, not {list(tensor.shape)}")
    return own
