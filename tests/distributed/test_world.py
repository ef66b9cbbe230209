"""Which device a worker takes and how workers send: the same decision on every rank, or a refusal that says what to do.

There is no GPU here: each rank is a thread that torch.cuda answers as on the machine that the test gives it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from gpipe_cli.distributed import world
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch import join
from gpipe_cli.launch.context import Context


@dataclass(frozen=True)
class Place:
    """Where a rank is started.

    Attributes:
        machine: its name.
        local_rank: among the ranks there.
        gpus: that the rank sees, by their place on the machine's bus; their slices (MIG) have letters.
    """

    machine: str
    local_rank: int
    gpus: Sequence[str]


class Cluster:
    """Every rank's `join_world`, as far as the process group that it would join."""

    def __init__(self) -> None:
        self.rank = threading.local()
        self.devices: list[torch.device] = []
        self.events: list[dict[str, Any]] = []

    @property
    def place(self) -> Place:
        place: Place = self.rank.place
        return place

    def properties(self, device: torch.device) -> Any:
        name = self.place.gpus[device.index]
        bus = int(name.rstrip("ab"))
        return SimpleNamespace(
            uuid=f"{self.place.machine} {name}", pci_domain_id=0, pci_bus_id=bus, pci_device_id=0, name="H100"
        )

    def backends(self, places: Sequence[Place], device: str = "auto", backend: str = "auto") -> list[Any]:
        """What each rank's process group is made of; the error where it refuses."""
        store = HashStore()

        def join_as(rank: int) -> Any:
            self.rank.place = places[rank]
            context = Context(
                *(rank, len(places), places[rank].local_rank, Path(), lambda: store),
                emit=self.events.append,
                stop_requested=lambda: False,
            )
            try:
                world.join_world(context, len(places), 1, device, backend)
            except (Joined, ConfigurationError) as answer:
                return answer if isinstance(answer, ConfigurationError) else str(answer)

        with ThreadPoolExecutor(len(places)) as ranks:
            return list(ranks.map(join_as, range(len(places))))


class Joined(Exception):
    """A rank has come as far as its process group."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()

    def init_process_group(self: Context, backend: str) -> None:
        raise Joined("nccl" if "nccl" in backend else backend)

    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Context, "init_process_group", init_process_group)
    monkeypatch.setattr(world, "machine_id", lambda: made.place.machine)
    monkeypatch.setattr(world, "count_gpus", lambda: len(made.place.gpus))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(made.place.gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(made.place.gpus))
    monkeypatch.setattr(torch.cuda, "set_device", made.devices.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", made.properties)
    return made


def machine(name: str, ranks: int, gpus: Sequence[str]) -> list[Place]:
    return [Place(name, local_rank, gpus) for local_rank in range(ranks)]


EIGHT = [str(number) for number in range(8)]
TWO_MACHINES = [*machine("a", 8, EIGHT), *machine("b", 8, EIGHT)]
ONE_VISIBLE_EACH = [Place("a", number, [str(number)]) for number in range(4)]
UNEQUAL_MACHINES = [*machine("a", 4, EIGHT[:4]), *machine("b", 4, EIGHT[:2])]
WITHOUT_LOCAL_RANK = [Place("a", 0, EIGHT)] * 4
SLICES = [Place("a", 0, ["3a"]), Place("a", 0, ["3b"])]
ONE_ON_A_CPU = [*machine("a", 2, EIGHT), *machine("b", 1, [])]


@pytest.mark.parametrize(
    ("places", "backend"),
    [
        pytest.param(machine("a", 4, EIGHT), "nccl", id="one machine"),
        pytest.param(TWO_MACHINES, "nccl", id="two machines, and nobody says how many ranks each has"),
        pytest.param(ONE_VISIBLE_EACH, "nccl", id="each rank sees one GPU"),
        pytest.param(UNEQUAL_MACHINES, "gloo", id="enough GPUs on one machine, not on the other"),
        pytest.param(WITHOUT_LOCAL_RANK, "gloo", id="all take the first GPU"),
        pytest.param(SLICES, "gloo", id="slices of one GPU"),
        pytest.param(ONE_ON_A_CPU, "gloo", id="a machine without GPUs"),
        pytest.param(machine("a", 2, []), "gloo", id="CPUs"),
    ],
)
def test_all_ranks_decide_alike(cluster: Cluster, places: list[Place], backend: str) -> None:
    assert cluster.backends(places) == [backend] * len(places)


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (UNEQUAL_MACHINES, "ranks 4, 6 on one GPU; ranks 5, 7 on one GPU"),
        (ONE_ON_A_CPU, "rank 2 on the CPU"),
    ],
)
def test_nccl_without_a_gpu_for_each_is_refused_on_every_rank(
    cluster: Cluster, places: list[Place], reason: str
) -> None:
    answers = cluster.backends(places, backend="nccl")
    assert all(isinstance(answer, ConfigurationError) for answer in answers), answers
    assert all(
        f"pipeline.backend=nccl needs a GPU of its own for every worker, but {reason}" in str(a) for a in answers
    )


def test_nccl_with_a_gpu_for_each_is_taken(cluster: Cluster) -> None:
    assert cluster.backends(machine("a", 2, EIGHT), backend="nccl") == ["nccl", "nccl"]


def test_gloo_may_be_asked_for(cluster: Cluster) -> None:
    assert cluster.backends(machine("a", 2, EIGHT), backend="gloo") == ["gloo", "gloo"]


def test_gpus_that_do_not_talk_to_each_other_are_told_of_once(cluster: Cluster) -> None:
    cluster.backends(WITHOUT_LOCAL_RANK)
    [event] = cluster.events
    assert event["kind"] == "warning"
    assert event["text"].endswith("ranks 0, 1, 2, 3 on one GPU")


def test_cpus_are_no_reason_for_a_warning(cluster: Cluster) -> None:
    cluster.backends(machine("a", 2, []))
    assert cluster.events == []


def test_one_rank_waits_for_nobody(cluster: Cluster) -> None:
    cluster.rank.place = Place("a", 0, EIGHT)
    context = Context(0, 1, 3, Path(), HashStore, lambda event: None, lambda: False)
    alone = world.join_world(context, 1, 1, "auto", "auto")
    assert (alone.device, alone.wire, alone.all_ranks) == (torch.device("cuda", 3), torch.device("cuda", 3), None)


def test_cuda_without_a_gpu_is_refused(cluster: Cluster) -> None:
    [answer] = cluster.backends(machine("a", 1, []), device="cuda")
    assert isinstance(answer, ConfigurationError)
    assert "pipeline.device=cuda: there is no GPU" in str(answer)
    assert "use pipeline.device=cpu" in str(answer)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_that_torch_cannot_use_are_not_passed_over(
    cluster: Cluster, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    [answer] = cluster.backends(machine("a", 1, EIGHT), device=device)
    assert isinstance(answer, ConfigurationError)
    assert f"pipeline.device={device}: there are 8 GPUs" in str(answer)
    assert "update the NVIDIA driver" in str(answer) and "use pipeline.device=cpu" in str(answer)


def test_the_cpu_may_be_asked_for_beside_gpus_that_torch_cannot_use(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cluster.backends(machine("a", 2, EIGHT), device="cpu") == ["gloo", "gloo"]


def test_a_gpu_of_which_torch_does_not_know_the_place_goes_by_its_uuid(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=cluster.place.gpus[device.index])
    )
    assert cluster.backends(ONE_VISIBLE_EACH) == ["nccl"] * 4


@pytest.mark.parametrize(
    ("environment", "local_rank"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 1),
        ({"SLURM_LOCALID": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, 3),  # mpirun in a batch job
        ({"MPI_LOCALRANKID": "4"}, 4),
    ],
)
def test_a_ranks_number_on_its_machine_is_what_its_launcher_says(
    environment: dict[str, str], local_rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(join, "_base_store", HashStore)
    monkeypatch.setattr(join, "call_entry", lambda entry, context, *_, **__: context.local_rank)
    assert join.join("module:main", {}, tmp_path, lambda event: None) == local_rank
