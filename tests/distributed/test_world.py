"""Tests that all ranks decide alike about devices and backend, the tree by which they meet, and shares of a state."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_plan import OWN, planned
from torch.distributed import HashStore, Store

from gpipe_cli.benchmarks.tables.workers import run_workers
from gpipe_cli.distributed import device, world
from gpipe_cli.distributed.device import CPU, choose_backend, choose_device
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch.context import Context

TWO_MACHINES = ["a 0", "a 1", "b 0", "b 1"]
UNEQUAL_MACHINES = ["a 0", "a 1", "a 2", "a 3", "b 0", "b 1", "b 0", "b 1"]
ONE_ON_A_CPU = ["a 0", "a 1", CPU]


class Ranks:
    """Runs the ranks of one job, each in a thread; they share a store and collect their events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def context(self, rank: int, size: int, store: Store, local_rank: int = 0) -> Context:
        return Context(rank, size, local_rank, Path(), lambda: store, self.events.append, lambda: False)

    def backends(self, devices: Sequence[str], backend: str = "auto") -> list[Any]:
        """Returns each rank's backend, or the error where it refuses; ``devices``: each rank's identity."""

        def choose(context: Context) -> Any:
            try:
                return choose_backend(context, devices[context.rank], backend)
            except ConfigurationError as error:
                return error

        return self.together(len(devices), choose)

    def together(self, size: int, act: Callable[[Context], Any]) -> list[Any]:
        """Returns what each rank's call of ``act`` returns."""
        store = HashStore()
        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(lambda rank: act(self.context(rank, size, store, rank)), range(size)))


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        pytest.param(TWO_MACHINES, "nccl", id="two machines"),
        pytest.param(UNEQUAL_MACHINES, "gloo", id="enough GPUs on one machine, not on the other"),
        pytest.param(ONE_ON_A_CPU, "gloo", id="a machine without GPUs"),
        pytest.param([CPU, CPU], "gloo", id="CPUs"),
    ],
)
def test_all_ranks_decide_alike(devices: list[str], backend: str) -> None:
    assert Ranks().backends(devices) == [backend] * len(devices)


@pytest.mark.parametrize(
    ("devices", "reason"), [(UNEQUAL_MACHINES, "8 workers have 6 GPUs"), (ONE_ON_A_CPU, "3 workers have 2 GPUs")]
)
def test_nccl_without_a_gpu_for_each_is_refused_on_every_rank(devices: list[str], reason: str) -> None:
    answers = Ranks().backends(devices, backend="nccl")
    expected = f"pipeline.backend=nccl needs a GPU of its own for every worker, but {reason}"
    assert all(isinstance(answer, ConfigurationError) and expected in str(answer) for answer in answers), answers


def test_gpus_that_cannot_send_to_each_other_are_one_warning() -> None:
    (ranks := Ranks()).backends(["a 0"] * 4)
    [event] = ranks.events
    assert event["kind"] == "warning"
    assert event["text"].endswith("4 workers have 1 GPUs")


def gpus(monkeypatch: pytest.MonkeyPatch, installed: int, usable: int) -> None:
    monkeypatch.setattr(device, "count_gpus", lambda: installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: usable)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(device, "compute_on", lambda device: None)


def test_ranks_of_a_machine_take_its_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, installed=2, usable=2)
    contexts = [Ranks().context(rank, 3, HashStore(), local_rank=rank) for rank in range(3)]
    assert [choose_device(context, "auto").index for context in contexts] == [0, 1, 0]


@pytest.mark.parametrize("chosen", [0, 3])
def test_a_program_that_has_chosen_a_gpu_keeps_it(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, installed=4, usable=4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=str(device)))
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert world.join_torchrun(1, "auto", "auto").device.index == (chosen or 1)


@pytest.mark.parametrize("installed", [0, 8])
def test_gpus_that_torch_cannot_use_are_told(installed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, installed=installed, usable=0)
    context = Ranks().context(0, 1, HashStore())
    for wanted in ("cpu",) if installed else ("cpu", "auto"):
        assert choose_device(context, wanted) == torch.device("cpu")
    for wanted in ("auto", "cuda") if installed else ("cuda",):
        said = rf"={wanted}: .* none of the {installed} GPUs .*NVIDIA driver .*use pipeline\.device=cpu"
        with pytest.raises(ConfigurationError, match=said):
            choose_device(context, wanted)


def test_a_gpu_without_kernels_in_this_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    gpus(monkeypatch, installed=1, usable=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla K80")
    monkeypatch.setattr(device, "compute_on", fail)
    said = r"cannot compute on the Tesla K80 .*: .* no kernel image .*the device; "
    with pytest.raises(ConfigurationError, match=said):
        choose_device(Ranks().context(0, 1, HashStore()), "auto")


@pytest.mark.parametrize("newer", [False, True])
def test_nccl_is_told_its_gpu_where_it_would_guess(monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
    """torch's newer class guesses; the older one, in torch 2.14 beside it, would use one queue if it was told."""
    gpus(monkeypatch, installed=2, usable=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=str(device)))
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", str(int(newer)))
    monkeypatch.setattr(dist.Backend, "_plugins", {})  # torch registers "nccl" when it is first asked for
    if not newer:  # nor has torch's wheel for CPUs, or an earlier release, the newer class
        monkeypatch.delattr(dist.distributed_c10d, "ProcessGroupNCCL2", raising=False)

    def told(context: Context) -> list[Any]:
        """Returns the backend and the GPU with which a rank would make its process group."""
        given: list[Any] = []

        def stop(*arguments: Any) -> None:
            given.extend(arguments)
            raise NotImplementedError

        monkeypatch.setattr(context, "init_process_group", stop)
        with suppress(NotImplementedError):
            world.join_world(context, 2, 1, "auto", "auto")
        return given

    bound = newer and hasattr(dist.distributed_c10d, "ProcessGroupNCCL2")
    told_gpus = [torch.device("cuda", rank) if bound else None for rank in range(2)]
    assert Ranks().together(2, told) == [["nccl", gpu] for gpu in told_gpus]


# -- the tree of ranks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_every_rank_reads_what_each_has_written_in_their_order(backend: str) -> None:
    size = 6
    totals = [[*(0.1 * (rank + step) for rank in range(size)), size] for step in range(2)]
    gathered = [[rank] for rank in range(size)]
    expected = [[totals, [[] if rank else gathered, {"from": 0}]] for rank in range(size)]
    assert run_workers("group_jobs:meet", size, {"backend": backend}) == expected


def test_where_all_workers_stand_still_is_told_once() -> None:
    first = "no progress for 0.02 minutes (launch.hang_minutes), and no worker has died"
    places = [f"  worker {rank}: cell {rank}, micro-batch 3, forward" for rank in range(2)]
    lines = [first + ":", *places, "  worker 2: no answer: it is stopped, or goes on"]
    assert run_workers("group_jobs:hang", 3, {"minutes": 0.02}) == ["\n".join(lines)]


# -- an optimizer's state divided among replicas ---------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_divided_updates_and_early_sums_have_the_bits_of_whole_ones(replicas: int) -> None:
    assert run_workers("group_jobs:shard", replicas, {}) == []


def test_a_plan_counts_the_largest_share() -> None:
    words = (*OWN, "pipeline.K=2", "pipeline.M=4", "pipeline.replicas=4", "optimizer=adam")
    whole, divided = planned(*words), planned(*words, "pipeline.shard_optimizer=true")
    assert divided.cells[0].optimizer == pytest.approx(whole.cells[0].optimizer / 4)
    assert divided.cells[0].gradients == whole.cells[0].gradients
    assert divided.memory < whole.memory
