"""Entry points for test_bench_real.py: what gpipe-bench's workers run, with layers that tests can judge."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.bench import real_throughput
from gpipe_cli.bench.profiles import Model
from gpipe_cli.bench.turns import of_all_workers
from gpipe_cli.distributed.world import join_world
from gpipe_cli.launch.context import Context
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.transformer_lm import transformer_lm

WORKERS = 2
EXAMPLES = 4


def quiet_layers(model: Model) -> list[LayerBuilder]:
    """Without noise, so that all contenders compute the same."""
    if model.family == "amoebanet":
        return amoebanet(3, 16, 10, 64, dropout=0.0, drop_path_keep=1.0, auxiliary_head=False)
    return transformer_lm(4, H=64, A=1, vocabulary=100, d_model=32, dropout=0.0, attention_dropout=0.0)


def gradients(context: Context, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Entry point: for each model and M the gradients' norms by contender, smallest first; None of one that refuses."""
    world = join_world(context, context.world_size, 1, "cpu", "auto")
    found = []
    for family, M in config["settings"]:
        model = Model(family, (), small=True)
        torch.manual_seed(0)
        builders, examples = quiet_layers(model), real_throughput.random_examples(model, EXAMPLES)
        cuts = {cells: even_cut(len(builders), cells) for cells in (WORKERS, 2 * WORKERS)}
        setting = real_throughput.RealSetting(builders, cuts, M, config["remat"], examples, world)
        norms: dict[str, list[float] | None] = {}
        for name in config["contenders"]:
            contender = real_throughput.contender(name, setting)
            if contender is None:
                norms[name] = None
                continue
            contender.step()
            contender.step()  # gradients add up: a step leaves the next one as it found it
            mine = [float(p.grad.norm()) for p in contender.parameters if p.grad is not None]
            norms[name] = sorted(norm for worker in of_all_workers(mine, WORKERS) for norm in worker)
        found.append(norms)
    return found


def even_cut(layers: int, cells: int) -> list[int]:
    return [layers * (cell + 1) // cells - layers * cell // cells for cell in range(cells)]


class Hungry(nn.Module):
    """Finds no room for more than so many examples."""

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
    """A narrow Transformer whose last worker ends with such a layer."""

    def build(model: Model) -> list[LayerBuilder]:
        layers = transformer_lm(2, H=64, A=1, vocabulary=100, d_model=32)
        return [*layers[:-1], LayerBuilder("extra", partial(layer, *arguments)), layers[-1]]

    return build


def hungry(context: Context, config: dict[str, Any]) -> float | None:
    """Entry point: `real_throughput.worker`, on devices with room for two examples."""
    real_throughput.build_layers = layers_behind(Hungry, 2)
    return cut_anew(context, config)


def starving(context: Context, config: dict[str, Any]) -> float | None:
    """Entry point: the same without room for one."""
    real_throughput.build_layers = layers_behind(Hungry, 0)
    return cut_anew(context, config)


def broken(context: Context, config: dict[str, Any]) -> float | None:
    real_throughput.build_layers = layers_behind(Broken)
    return cut_anew(context, config)


def cut_anew(context: Context, config: dict[str, Any]) -> float | None:
    """With the cuts that this model has."""
    cuts = {cells: even_cut(7, int(cells)) for cells in config["setting"]["cuts"]}
    return real_throughput.worker(context, {**config, "setting": {**config["setting"], "cuts": cuts}})


def greedy(context: Context, config: dict[str, Any]) -> None:
    """Entry point: one worker asks for a million gigabytes, the other waits for it."""
    context.init_process_group("gloo")
    if context.rank == 0:
        torch.distributed.barrier()
        return
    try:
        torch.empty(10**15, dtype=torch.uint8)
    except RuntimeError as error:
        raise RuntimeError("wrapped, as torch's pipelining does") from error


def crash(context: Context, config: dict[str, Any]) -> None:
    raise ValueError("no matter of memory")
