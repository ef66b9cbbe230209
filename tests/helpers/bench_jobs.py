"""Defines entry points for test_bench_real.py: gpipe-bench's workers with layers of known behaviour."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.bench import contenders, models
from gpipe_cli.bench.contenders import bare_step
from gpipe_cli.bench.throughput import PaperModel
from gpipe_cli.bench.timing import of_all_workers
from gpipe_cli.distributed.world import join_world
from gpipe_cli.launch.context import Context
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.transformer_lm import transformer_lm

WORKERS = 2
EXAMPLES = 4


def quiet_layers(model: PaperModel) -> list[LayerBuilder]:
    """Returns layers without noise, so that all contenders compute the same."""
    if model.family == "amoebanet":
        return amoebanet(3, 16, 10, 64, dropout=0.0, drop_path_keep=1.0, auxiliary_head=False)
    return transformer_lm(4, H=64, A=1, vocabulary=100, d_model=32, dropout=0.0, attention_dropout=0.0)


def gradients(context: Context, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Entry point: returns for each model and M the gradients' norms by contender, sorted; None where it refuses."""
    world = join_world(context, context.world_size, 1, "cpu", "auto")
    found = []
    for family, M in config["settings"]:
        model = PaperModel(family, (), small=True)
        torch.manual_seed(0)
        builders, examples = quiet_layers(model), models.random_examples(model, EXAMPLES)
        cuts = {cells: even_cut(len(builders), cells) for cells in (WORKERS, 2 * WORKERS)}
        norms: dict[str, list[float] | None] = {}
        for name in config["contenders"]:
            work = models.workload_of(builders, cuts, M, config["remat"], examples, world)
            step = bare_step(name, work)
            if step is None:
                norms[name] = None
                continue
            step()
            step()  # gradients add up: a step leaves the next one as it found it
            mine = [float(p.grad.norm()) for p in work.parameters if p.grad is not None]
            norms[name] = sorted(norm for worker in of_all_workers(mine, WORKERS) for norm in worker)
        found.append(norms)
    return found


def even_cut(layers: int, cells: int) -> list[int]:
    return [layers * (cell + 1) // cells - layers * cell // cells for cell in range(cells)]


class Hungry(nn.Module):
    """Runs out of memory with more than so many examples."""

    def __init__(self, examples: int) -> None:
        super().__init__()
        self._examples = examples

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self._examples:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 84.00 GiB.")
        return x


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("broken in another way")


def layers_behind(layer: type[nn.Module], *arguments: object) -> Any:
    """Builds a narrow Transformer with such a layer on its last worker."""

    def build(model: PaperModel) -> list[LayerBuilder]:
        layers = transformer_lm(2, H=64, A=1, vocabulary=100, d_model=32)
        return [*layers[:-1], LayerBuilder("extra", partial(layer, *arguments)), layers[-1]]

    return build


def hungry(context: Context, config: dict[str, Any]) -> Any:
    """Entry point: runs `contenders.worker` on devices with room for two examples."""
    return run_with(layers_behind(Hungry, 2), context, config)


def starving(context: Context, config: dict[str, Any]) -> Any:
    """Entry point: the same without room for one."""
    return run_with(layers_behind(Hungry, 0), context, config)


def broken(context: Context, config: dict[str, Any]) -> Any:
    return run_with(layers_behind(Broken), context, config)


def run_with(build: Any, context: Context, config: dict[str, Any]) -> Any:
    """Runs `contenders.worker` with these 7 layers."""
    models.build_layers = build
    (setting,) = config["settings"]
    cuts = {cells: even_cut(7, int(cells)) for cells in setting["cuts"]}
    return contenders.worker(context, {**config, "settings": [{**setting, "cuts": cuts}]})


def greedy(context: Context, config: dict[str, Any]) -> None:
    """Entry point: one worker asks for a million gigabytes, the other waits for it."""
    context.init_process_group()
    if context.rank == 0:
        torch.distributed.barrier()
        return
    try:
        torch.empty(10**15, dtype=torch.uint8)
    except RuntimeError as error:
        raise RuntimeError("wrapped, as torch's pipelining does") from error


def crash(context: Context, config: dict[str, Any]) -> None:
    raise ValueError("no matter of memory")
