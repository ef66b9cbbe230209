"""Plants faults in forward and recompute: inputs, boundaries, random numbers, modes, precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from struct import pack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpipe_cli.distributed.runtime import PipelineRuntime
from gpipe_cli.pipeline import randomness
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.pipeline.engine import Pipeline, _Step, _TrainingStep
from gpipe_cli.pipeline.messages.boundary import BoundarySpec
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.schedule.instruction import Instruction, Op
from gpipe_cli.trainer import batches

from .fault import fault, handlers_replaced, replaced, run_training

Patch = AbstractContextManager[Any]
ALWAYS, BF16 = "pipeline.remat=always", "precision=bf16"

# -- what enters a cell ------------------------------------------------------------------------------------------------


@fault(r"mix_2 \(cell 2\).*micro-batch 2", "that of micro-batch 1", "model.dropout=0")
def stale_activation_buffer() -> Patch:
    """Runs cell 2 for micro-batch 2 on the activations of micro-batch 1."""
    return _other_input(Op.FORWARD)


@fault(r"mix_2 \(cell 2\)", "another input in recompute than in forward: it is that of micro-batch 1")
def another_input_recomputed() -> Patch:
    """Recomputes cell 2 for micro-batch 2 from the activations of micro-batch 1."""
    return _other_input(Op.RECOMPUTE)


def _other_input(op: Op) -> Patch:
    def stale(run: Any, step: _TrainingStep, i: Instruction) -> None:
        if (i.cell, i.micro_batch) == (2, 2):
            spec = BoundarySpec.of(step.buffers.inputs[2, 2])
            step.buffers.inputs[2, 2] = tuple(
                t.detach().requires_grad_(d.needs_gradient)
                for t, d in zip(step.buffers.inputs[2, 1], spec.tensors, strict=True)
            )
        run(step, i)

    return handlers_replaced(stale, op)


@fault(r"mix_2 \(cell 2\).*micro-batch 2", "that of micro-batch 1", "model.dropout=0", workers=4)
def stale_message() -> Patch:
    """Hands cell 2 the message before once more, in place of that of micro-batch 2."""
    last: dict[int, Any] = {}

    def stale(receive: Any, step: _Step, i: Instruction, separate: int = 0) -> tuple[Tensor, ...]:
        tensors = receive(step, i, separate)
        if (i.op, i.cell) != (Op.RECEIVE_ACTIVATION, 2):
            return tensors  # type: ignore[no-any-return]  # of the engine
        last[i.micro_batch] = tuple(tensor.detach().clone() for tensor in tensors)
        return last[1] if i.micro_batch == 2 else tensors  # type: ignore[no-any-return]  # likewise

    return replaced(_Step, "_receive", stale)


def _mini_batch(change: Callable[[list[Any]], list[Any]]) -> Patch:
    """Changes the micro-batches with which a step begins."""

    def start(function: Any, pipeline: Pipeline, instructions: Any, given: Any, parts: Any, *a: Any, **k: Any) -> Any:
        return function(pipeline, instructions, given, None if parts is None else change(parts), *a, **k)

    return replaced(Pipeline, "train_step", start)


@fault("embed.*micro-batch 0", "that of micro-batch 1", "model.dropout=0")
def inputs_exchanged() -> Patch:
    """Exchanges the inputs of micro-batches 0 and 1, and not their targets."""

    def exchange(parts: list[Any]) -> list[Any]:
        (x0, y0), (x1, y1), *others = parts
        return [(x1, y0), (x0, y1), *others]

    return _mini_batch(exchange)


@fault("embed", "other data|input")
def mini_batch_skipped() -> Patch:
    """Trains on the second mini-batch first."""

    def skip(read: Any, source: Any, position: Any, *rest: Any) -> Any:
        found = read(source, position, *rest)
        next(found)
        return found

    return replaced(batches, "training_batches", skip)


@fault("replica 1", "that of replica 0|other data", "model.dropout=0", replicas=2)
def replicas_read_the_same() -> Patch:
    """Lets replica 1 read the share of replica 0."""

    def same(read: Any, source: Any, position: Any, M: int, replica: int, replicas: int) -> Any:
        return read(source, position, M, 0, replicas)

    return replaced(batches, "training_batches", same)


@fault("layer embed.*micro-batch 0", "elements instead of.*rows", "data.batch_size=14")
def rows_cut_to_the_smallest() -> Patch:
    """Cuts uneven micro-batches to the size of the smallest."""

    def cut(parts: list[Any]) -> list[Any]:
        least = min(len(x[0]) for x, _ in parts)
        return [tuple(tuple(tensor[:least] for tensor in side) for side in both) for both in parts]

    return _mini_batch(cut)


@fault(r"micro-batch 3", "left out|missing|did not run")
def last_micro_batch_dropped() -> Patch:
    """Trains on three of four micro-batches."""

    def drop(
        run: Any, runtime: PipelineRuntime, plan: Any, step: int, steps: int, parts: Any, *rest: Any, **more: Any
    ) -> Any:
        fewer = replace(plan, signatures=plan.signatures[:-1])
        return run(runtime, fewer, step, steps, parts and parts[:-1], *rest, **more)

    return replaced(PipelineRuntime, "train_step", drop)


@fault(r"mix_2 \(cell 2\)", "rounded|precision|bfloat16")
def boundary_in_bfloat16() -> Patch:
    """Rounds what crosses one boundary to bfloat16."""

    def narrow(pass_on: Any, step: _Step, i: Instruction, outputs: tuple[Tensor, ...]) -> None:
        if i.cell == 1:
            outputs = (outputs[0].bfloat16().to(outputs[0].dtype), *outputs[1:])
        pass_on(step, i, outputs)

    return replaced(_Step, "_pass_on", narrow)


# -- random numbers ----------------------------------------------------------------------------------------------------


@fault(r"mix_0 \(cell 0\)", "recompute drew other random numbers.*that of step 8", ALWAYS)
def other_noise_in_recompute() -> Patch:
    """Seeds the noise of a recompute by another step."""
    return run_training(lambda run, c, x, y, step, m, s, first: run(c, x, y, step + 7 * (not first), m, s, first))


@fault(r"mix_2 \(cell 2\)", "drew other random numbers.*that of step 8")
def other_noise_in_forward() -> Patch:
    """Seeds the noise of cell 2 by another step."""
    return run_training(lambda run, c, x, y, step, m, s, first: run(c, x, y, step + 7 * (c.number == 2), m, s, first))


@fault(r"mix_0 \(cell 0\).*micro-batch 1", "that of micro-batch 0")
def one_mask_for_all_micro_batches() -> Patch:
    """Gives every micro-batch the noise of micro-batch 0."""
    return run_training(lambda run, c, x, y, step, m, s, first: run(c, x, y, step, 0, s, first))


@fault(r"mix_2 \(cell 2\)", "that of layer embed")
def noise_by_place_in_the_cell() -> Patch:
    """Counts layers from the beginning of their cell, so that noise depends on the cut."""

    def count(seeds: Any, noise: NoiseSource, step: int, m: int, layers: Sequence[int]) -> list[int]:
        return seeds(noise, step, m, [layer - min(layers) for layer in layers])  # type: ignore[no-any-return]

    def in_cell(run: Any, cell: Cell, *arguments: Any) -> Any:
        with replaced(NoiseSource, "seeds", count):
            return run(cell, *arguments)

    return run_training(in_cell)


def _seeds_without(position: int) -> Patch:
    """Seeds noise without one of (seed, step, replica, micro-batch, layers), on both sides."""

    def forget(form: str, *numbers: int) -> bytes:
        kept = list(numbers)
        if form == "<6q":
            kept[position] = 0
        return pack(form, *kept)

    return mock.patch.object(randomness, "pack", forget)


@fault(r"layer mix_0 \(cell 0\)", "seed.*that of step 1")
def noise_ignores_the_step() -> Patch:
    """Draws the same masks in every step."""
    return _seeds_without(2)


@fault(r"layer mix_0 \(cell 0\).*replica 1", "seed.*that of replica 0", replicas=2)
def noise_ignores_the_replica() -> Patch:
    """Draws the same masks in every replica."""
    return _seeds_without(3)


@fault(r"layer mix_0 \(cell 0\).*micro-batch", "seed.*that of micro-batch 0")
def noise_ignores_the_micro_batch() -> Patch:
    """Draws the same masks for every micro-batch."""
    return _seeds_without(4)


@fault(r"layer mix_0 \(cell 0\)", "seed.*that of layer embed")
def noise_ignores_the_layer() -> Patch:
    """Draws the same masks in every layer."""
    return replaced(NoiseSource, "seeds", lambda seeds, n, step, m, layers: seeds(n, step, m, [0] * len(layers)))


@fault(r"layer mix_0 \(cell 0\)", "wrong seed")
def noise_ignores_the_seed() -> Patch:
    """Draws the same masks whatever the seed of the run."""
    return _seeds_without(1)


# -- modes and precision -----------------------------------------------------------------------------------------------


@fault(r"layer mix_2 \(cell 2\)", "in evaluation mode")
def cell_in_evaluation_mode() -> Patch:
    """Trains cell 2 in evaluation mode, without dropout."""

    def evaluating(run: Any, cell: Cell, *arguments: Any) -> Any:
        if cell.number == 2:
            cell.train(False)
        return run(cell, *arguments)

    return run_training(evaluating)


@fault(r"fading \(cell 2\)", "begin_step", "model.odd=fading", "model.dropout=0")
def layer_not_told_the_step() -> Patch:
    """Leaves the layers of cell 2 without begin_step."""
    return replaced(Cell, "begin_step", lambda begin, cell, *a: None if cell.number == 2 else begin(cell, *a))


@fault(r"fading \(cell 2\)", "begin_step", "model.odd=fading", "model.dropout=0")
def layer_told_another_step() -> Patch:
    """Counts steps from 1 for the layers that have a schedule of their own."""
    return replaced(Cell, "begin_step", lambda begin, cell, step, steps: begin(cell, step + 1, steps))


@fault(r"cell 0", "recompute|computed again", ALWAYS, BF16, "model.dropout=0")
def recompute_without_autocast() -> Patch:
    """Recomputes in float32 what forward computed in bfloat16."""

    def wide(run: Any, cell: Cell, x: Any, y: Any, step: int, m: int, s: Any, first: bool) -> Any:
        for parameters, name, weight, _ in () if first else cell._casts._slots:
            parameters[name] = weight  # until the casts' own context ends
        with nullcontext() if first else torch.autocast("cpu", enabled=False):
            return run(cell, x, y, step, m, s, first)

    return run_training(wide)


@fault(r"mix_2 \(cell 2\)", "with no autocast", BF16, "model.dropout=0")
def cell_without_autocast() -> Patch:
    """Computes cell 2 in float32 where the run is in bfloat16."""

    def wide(run: Any, cell: Cell, *arguments: Any) -> Any:
        with torch.autocast("cpu", enabled=False) if cell.number == 2 else nullcontext():
            return run(cell, *arguments)

    return run_training(wide)
