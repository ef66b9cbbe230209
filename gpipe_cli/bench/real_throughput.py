"""One worker's part of table 2 with layers that compute: one contender in one setting, in processes of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_cli.distributed.world import World, join_world
from gpipe_cli.launch.context import Context
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.micro_batch import Tensors
from gpipe_cli.partition.partition import cell_layers
from gpipe_cli.pipeline.cell import build_layer

from .driver import CPU, Step, plain_step
from .models import build_layers, random_examples
from .peers import Work, torch_step, torchgpipe_step
from .profiles import Model
from .real import SEED, cross_entropy_sum, parameters_of, real_step
from .stopwatch import StopWatch
from .throughput_settings import PLAIN, TORCH, TORCHGPIPE
from .turns import typical

LEARNING_RATE = 1e-6  # of plain SGD: the weights of a measurement should stay finite, nothing else
EXAMPLES_SEED = 2  # the first worker has the inputs and a peer's last one the targets: they should be of one mini-batch


class Contender(NamedTuple):
    """A step without its update, and the parameters on this worker that it gives gradients to."""

    step: Step
    parameters: list[nn.Parameter]


@dataclass(frozen=True)
class RealSetting:
    """One model at one K and M.

    Attributes:
        cuts: number of cells to the layers of each.
        examples: inputs and targets of the mini-batch, on the CPU.
    """

    builders: Sequence[LayerBuilder]
    cuts: dict[int, list[int]]
    M: int
    remat: str
    examples: tuple[Tensor, Tensor]
    world: World

    @property
    def work(self) -> Work:
        weight = len(self.examples[0])

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy_sum((outputs,), (targets,))[0] / weight

        return Work(*self.examples, loss, self.world.device, real=True)

    def modules(self, cells: int, cell: int, device: torch.device | None = None) -> list[nn.Module]:
        """New layers of one cell, with the weights that the engine's have; ``device`` None: this worker's."""
        layers = cell_layers(self.cuts[cells])[cell]
        return [build_layer(self.builders[i], i, SEED, device or self.world.device) for i in layers]


def worker(context: Context, config: dict[str, Any]) -> float | None:
    """Entry point: the median seconds of a contender's step, which is forward, backward and an update by plain SGD.

    Args:
        config: ``repetitions``, ``contender`` and ``setting`` (of `Setting.config`).

    Returns:
        None where the contender refuses the setting.
    """
    world = join_world(context, context.world_size, 1, "auto", "auto")
    setting = config["setting"]
    model = Model(setting["family"], tuple(setting["sizes"]), setting["small"])
    torch.manual_seed(EXAMPLES_SEED)
    examples = random_examples(model, setting["examples"])
    cuts = {int(cells): sizes for cells, sizes in setting["cuts"].items()}
    found = contender(
        config["contender"], RealSetting(build_layers(model), cuts, setting["M"], setting["remat"], examples, world)
    )
    if found is None:
        return None
    watch, step = StopWatch(world.rank, world.size), whole_step(found, world.device)
    return typical([watch.time(step) for _ in range(config["repetitions"] + 1)][1:])


def contender(name: str, setting: RealSetting) -> Contender | None:
    """By its name, those of `throughput.contender`; None, on all workers, where it refuses the setting."""
    if name == PLAIN:
        return plain_contender(setting)
    if name == TORCHGPIPE:
        return torchgpipe_contender(setting)
    if name.startswith(TORCH):
        return torch_contender(name.removeprefix(TORCH), setting)
    world = setting.world
    sizes = setting.cuts.get(2 * world.workers if name.startswith("interleaved") else world.workers)
    if sizes is None:
        return None
    step = real_step(setting.builders, sizes, world, setting.examples, setting.M, name, setting.remat)
    return Contender(step, parameters_of(step))


def plain_contender(setting: RealSetting) -> Contender:
    """A loop on the first worker's device; the other workers wait."""
    world, work = setting.world, setting.work
    if world.worker > 0:
        return Contender(lambda: None, [])
    modules = [module for cell in range(world.workers) for module in setting.modules(world.workers, cell)]

    def loss(outputs: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
        return work.loss(outputs[0], targets[0]), torch.zeros(0)

    def step() -> None:
        batch = (tensor.to(world.device, non_blocking=True).tensor_split(setting.M) for tensor in setting.examples)
        plain_step(modules, [((x,), (y,)) for x, y in zip(*batch, strict=True)], loss)()

    return Contender(step, parameters_in(modules))


def torch_contender(kind: str, setting: RealSetting) -> Contender | None:
    """torch.distributed.pipelining; None also where it would have to send from a GPU through the CPU, which it cannot,
    and where the micro-batches would have different sizes."""
    world, M = setting.world, setting.M
    K, rank = world.workers, world.worker
    if world.wire.type != world.device.type or len(setting.examples[0]) % M:
        return None
    cells = 2 * K if kind == "interleaved" else K
    if cells not in setting.cuts:
        return None
    chunks = [setting.modules(cells, cell) for cell in range(rank, cells, K)]
    step = torch_step(kind, chunks, setting.remat != "never", rank, K, M, setting.work)
    return None if step is None else Contender(step, parameters_in(module for chunk in chunks for module in chunk))


def torchgpipe_contender(setting: RealSetting) -> Contender | None:
    """None also where there are GPUs, but not one for each cell: it would run on other devices than ours."""
    world, cells, devices = setting.world, [], None
    if world.device.type == "cuda":
        if torch.cuda.device_count() < world.workers:
            return None
        devices = [torch.device("cuda", number) for number in range(world.workers)]
    if world.worker == 0:  # on the CPU, from where torchgpipe takes each cell to its device
        cells = [setting.modules(world.workers, cell, CPU) for cell in range(world.workers)]
    step = torchgpipe_step(cells, setting.remat, world.worker, setting.M, setting.work, devices)
    return None if step is None else Contender(step, parameters_in(module for cell in cells for module in cell))


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def whole_step(contender: Contender, device: torch.device) -> Step:
    """The step with its update, to the end of all that this worker's device does, and others that it uses."""
    parameters = contender.parameters
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE) if parameters else None
    devices = {place for place in (device, *(parameter.device for parameter in parameters)) if place.type == "cuda"}

    def step() -> None:
        contender.step()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        for each in devices:
            torch.cuda.synchronize(each)

    return step
