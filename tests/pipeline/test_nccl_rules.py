"""Tests that no schedule waits for ever under the rules of NCCL and CUDA, and that wrong orders stall."""

from __future__ import annotations

import threading
from collections import defaultdict
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from nccl_rules import Call, Machine, Rules, Stalled
from nccl_runs import drawn_run, engine_calls, message_call, programs
from schedule_rules import scheduled
from small_models import CPU, build_all, mini_batch, small_model, token_loss, weight_of

from gpipe_cli.micro_batch import Tensors
from gpipe_cli.partition.partition import cell_layers
from gpipe_cli.pipeline.cell import Cell
from gpipe_cli.pipeline.engine import Engine, StepInput
from gpipe_cli.pipeline.messages.boundary import BoundarySpec
from gpipe_cli.pipeline.messages.process_group import Wait
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.position import Position
from gpipe_cli.schedule.instruction import COMPUTE, Instruction, Message, Op
from gpipe_cli.schedule.orders import KINDS, ROUND_ROBIN
from gpipe_cli.schedule.posting import post_ahead, post_when_sent

STRICTEST = Rules(buffer=0, occupies=True, hidden_syncs=1.0)
PAIR = (0, 1)


def stalls(*programs: list[Call], rules: Rules = STRICTEST, seeds: int = 20) -> bool:
    """Returns whether the programs stall, the same for every order of events."""
    found = set()
    for seed in range(seeds):
        try:
            Machine(programs, rules, seed).run()
            found.add(False)
        except Stalled:
            found.add(True)
    assert len(found) == 1, "only some orders of events stall"
    return found.pop()


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_run_stalls(first: int) -> None:
    for seed in range(first, first + 20):
        Machine(*drawn_run(seed), seed).run()


def test_receives_posted_two_ahead_would_stall_on_such_a_device() -> None:
    lists = scheduled("gpipe", PAIR, 4, "never")
    assert stalls(*(engine_calls(instructions, PAIR, post_ahead(instructions)) for instructions in lists))


class QueueTransport:
    """Carries messages between engines in threads of this process and records the calls that NCCL would see."""

    blocks_device = True

    def __init__(self, queues: dict[Any, SimpleQueue[Any]], placement: tuple[int, ...], calls: list[Call]) -> None:
        self._queues, self._placement, self._calls = queues, placement, calls

    def send(self, message: Message, tensors: Tensors, spec: BoundarySpec) -> None:
        self._calls.append(message_call("send", message, self._placement))
        self._queues[message].put(tuple(tensor.clone() for tensor in tensors))

    def post(self, message: Message, spec: BoundarySpec) -> Wait:
        self._calls.append(message_call("receive", message, self._placement))

        def wait(separate: int) -> Tensors:
            self._calls.append(Call("await", message))
            tensors: Tensors = self._queues[message].get(timeout=60)
            return tensors

        return wait

    def send_spec(self, boundary: int, spec: BoundarySpec) -> None:
        self._queues["spec", boundary].put(spec)

    def receive_spec(self, boundary: int) -> BoundarySpec:
        spec: BoundarySpec = self._queues["spec", boundary].get(timeout=60)
        return spec

    def drain(self) -> None:
        """Does nothing: a queue has taken every message."""


class RecordingPosition(Position):
    """Records the computations among the engine's instructions."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls

    def enter(self, cell: int | None, micro_batch: int | None, instruction: str | None) -> None:
        super().enter(cell, micro_batch, instruction)
        op = Op.__members__.get((instruction or "").upper())
        if op in COMPUTE:
            assert cell is not None and micro_batch is not None
            self._calls.append(Call("compute", Instruction(op, cell, micro_batch)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_s_calls_are_those_that_were_checked(kind: str) -> None:
    placement, M = PAIR * (2 if kind in ROUND_ROBIN else 1), 4
    lists = scheduled(kind, placement, M, "except_last")
    posts, queues = post_when_sent(lists), defaultdict[Any, SimpleQueue[Any]](SimpleQueue)
    calls: list[list[Call]] = [[], []]

    def work(worker: int) -> None:
        layers, noise = build_all(small_model(False, 0.0)), NoiseSource(1, 0, CPU)
        numbers = cell_layers([len(part) for part in torch.arange(7).tensor_split(len(placement))])
        cells = [Cell(k, [layers[i] for i in n], noise) for k, n in enumerate(numbers) if placement[k] == worker]
        where = RecordingPosition(calls[worker])
        transport = QueueTransport(queues, placement, calls[worker])
        engine = Engine(cells, placement, transport, token_loss, 1, CPU, where=where)
        micro_batches = mini_batch(0, 8, M)
        signatures = tuple(tuple(inputs[0].shape) for inputs, _ in micro_batches)
        step_input = StepInput(0, 1, signatures, 1 / weight_of(micro_batches))
        engine.train_step(lists[worker], step_input, None if worker else micro_batches, posts[worker])

    threads = [threading.Thread(target=work, args=(worker,)) for worker in PAIR]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == programs(lists, placement)
