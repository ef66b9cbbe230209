"""One worker's part of the throughput tables on emulated accelerators: contenders take turns, each step is timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gpipe_cli.launch.context import Context
from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.partition.partition import cell_layers
from gpipe_cli.pipeline.cell import BuiltLayer, Cell
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.pipeline.transport import Transport, connect_workers

from .driver import CPU, EngineStep, Step, cpu_transport, plain_step, step_of_cells
from .emulator import ACCELERATOR, WIDTH, SleepingLayer
from .link import Link, LinkTransport, measured_seconds
from .peers import Work, torch_step, torchgpipe_step
from .stopwatch import StopWatch
from .throughput_settings import PLAIN, TORCH, TORCHGPIPE
from .turns import join_emulation, take_turns, typical

EXAMPLES = 64  # rows of the emulated mini-batch; they say nothing about the model's
LINK_MESSAGES = 20  # in a row, to measure a link
LINK_SECONDS = 0.005  # each at least so long: a short one drowns in what sending takes


class EmulatedModel:
    """A model whose layers sleep, cut into cells, for one setting.

    Args:
        seconds: of each layer's forward of one micro-batch.
    """

    def __init__(self, seconds: Sequence[float], M: int, remat: str) -> None:
        self._seconds, self.M, self.remat = seconds, M, remat
        self.batch = torch.zeros(EXAMPLES, WIDTH)

    def layers(self, sizes: Sequence[int], cell: int, divisible: bool = False) -> list[BuiltLayer]:
        """New layers of one cell; ``divisible``: see `SleepingLayer`."""
        return [
            BuiltLayer(i, f"layer.{i}", SleepingLayer(self._seconds[i], divisible)) for i in cell_layers(sizes)[cell]
        ]

    def modules(self, sizes: Sequence[int], cell: int) -> list[Any]:
        return [layer.module for layer in self.layers(sizes, cell)]

    @property
    def work(self) -> Work:
        return Work(self.batch, self.batch)

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [((rows,), (rows,)) for rows in self.batch.tensor_split(self.M)]

    def engine_step(
        self, kind: str, sizes: Sequence[int], rank: int, K: int, transport: Transport | None = None
    ) -> EngineStep:
        """A training step of this worker by the engine; cells go round the workers.

        Args:
            transport: None: messages as fast as this machine has them.
        """
        placement = tuple(cell % K for cell in range(len(sizes)))
        mine = [cell for cell, worker in enumerate(placement) if worker == rank]
        cells = [Cell(cell, self.layers(sizes, cell, kind == "zero_bubble"), NoiseSource(0, 0, CPU)) for cell in mine]
        transport = transport or cpu_transport(placement)
        return step_of_cells(cells, placement, rank, transport, self.micro_batches, kind, self.remat)


def contender(name: str, model: EmulatedModel, cuts: dict[int, list[int]], rank: int, K: int) -> Step | None:
    """The step of one contender by its name; None where it refuses the setting.

    Args:
        name: a kind of schedule of the engine, or "torch gpipe", "torch 1f1b", "torch interleaved", "torchgpipe",
            or "plain": one device runs all layers, while the other workers wait.
        cuts: number of cells to the layers of each.
    """
    remat = model.remat != "never"
    if name == PLAIN:
        layers = [module for cell in range(K) for module in model.modules(cuts[K], cell)]
        return plain_step(layers, model.micro_batches) if rank == 0 else lambda: None
    if name == TORCHGPIPE:
        return torchgpipe_step(
            [model.modules(cuts[K], cell) for cell in range(K)], model.remat, rank, model.M, model.work
        )
    kind = name.removeprefix(TORCH)
    cells = 2 * K if kind.startswith("interleaved") else K
    if cells not in cuts:
        return None
    if not name.startswith(TORCH):
        return model.engine_step(name, cuts[cells], rank, K)
    chunks = [model.modules(cuts[cells], cell) for cell in range(rank, cells, K)]
    return torch_step(kind, chunks, remat, rank, K, model.M, model.work)


def linked_step(model: EmulatedModel, kind: str, sizes: Sequence[int], rank: int, K: int, link: Link) -> Step:
    """The engine's step over slow links, whose messages are free while the layers do not sleep."""
    transport = link_transport(link, K)
    step = model.engine_step(kind, sizes, rank, K, transport)

    def linked() -> None:
        transport.speed = ACCELERATOR.speed
        step()

    return linked


def link_transport(link: Link, K: int) -> LinkTransport:
    world = dist.group.WORLD
    assert world is not None
    return LinkTransport(link, connect_workers(tuple(range(K)), CPU, CPU, (world, world), world))


def worker(context: Context, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Entry point: for each setting the median seconds of each contender.

    Args:
        config: ``repetitions``, ``realtime`` and ``settings``, each with ``seconds`` (of each layer's forward of one
            micro-batch), ``cuts``, ``M``, ``remat``, ``contenders`` and ``link`` (None, or `Link`'s fields).

    Returns:
        For each setting ``seconds`` by contender (None where one refuses) and ``link``: `link_check`, or None.
    """
    watch = join_emulation(context, config["realtime"])
    rank, K = context.rank, context.world_size
    return [measure(setting, config["repetitions"], watch, rank, K) for setting in config["settings"]]


def measure(setting: dict[str, Any], repetitions: int, watch: StopWatch, rank: int, K: int) -> dict[str, Any]:
    model = EmulatedModel(setting["seconds"], setting["M"], setting["remat"])
    cuts = {int(cells): sizes for cells, sizes in setting["cuts"].items()}
    link = None if setting["link"] is None else Link(tuple(setting["link"]["carry"]), setting["link"]["latency"])
    steps: dict[str, Step | None] = {}
    for name in setting["contenders"]:
        steps[name] = (
            contender(name, model, cuts, rank, K) if link is None else linked_step(model, name, cuts[K], rank, K, link)
        )
    return {
        "seconds": {name: typical(seconds) for name, seconds in take_turns(steps, repetitions, watch).items()},
        "link": None if link is None else link_check(link, rank, K),
    }


def link_check(link: Link, rank: int, K: int) -> dict[str, float]:
    """What the links come to: ``carry``, seconds of one message in front of cell 1, and ``host``, of a free one."""
    transport = link_transport(link, K)
    times = max(1.0, LINK_SECONDS / link.carry[1])
    found = [
        measured_seconds(transport, rank, LINK_MESSAGES, times) / times,
        measured_seconds(transport, rank, LINK_MESSAGES, 0.0),
    ]
    seconds = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(seconds)
    return {"carry": float(seconds[0]), "host": float(seconds[1])}
