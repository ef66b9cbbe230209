"""Tests on which nodes replicas and workers lie: as typed or as planned, and with the same bits."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from composed import composed
from launch_command import free_port
from own_plan import EVEN, OWN, ZEROS, planned
from processes import command, succeeded

from benchmarks.gpu.checks import same_end
from gpipe_cli.config import PipelineConfig
from gpipe_cli.launch.context import Context
from gpipe_cli.planner.cells import Links
from gpipe_cli.planner.options import describe
from gpipe_cli.trainer.run import with_placement

NODES = (
    "plan.device={flops: 1e12, memory: 1GB, bandwidth: 1e15, link: 2.5e10, between: 1.25e9, latency: 0, overhead: 0}"
)
TWICE = ("pipeline.K=2", "pipeline.M=2", "pipeline.workers=2", "pipeline.replicas=2")
SHORT: tuple[str, ...] = ("debug=tiny", *TWICE, "trainer.steps=3", "pipeline.cost=flops", "logging.tensorboard=false")
SHORT += ("task.generation=null", "trainer.evaluate_first=false", "trainer.evaluate_every=null", "trainer.samples=0")


@pytest.mark.parametrize(
    ("placement", "summed", "sent"), [("pipeline_inside", 8 / 12.5, 1 / 25), ("replicas_inside", 1 / 25, 2 / 12.5)]
)
def test_what_leaves_a_node_shares_its_card(placement: str, summed: float, sent: float) -> None:
    """A gigabyte of each worker's gradients, and of a boundary in the middle; two nodes of eight devices."""
    values = {**composed()["pipeline"], "workers": 8, "replicas": 2, "placement": placement}
    links = Links(replace(describe("l4"), latency=0.0), PipelineConfig(**values, auto=[]), node=8)
    assert links.reduction(1e9, worker=0) == pytest.approx(summed)
    assert links.transfer(1e9, sender=3, receiver=4) == pytest.approx(sent)
    assert links.transfer(1e9, sender=0, receiver=1) == pytest.approx(1 / 25)


@pytest.mark.parametrize(("batch", "placement"), [(16, "replicas_inside"), (4096, "pipeline_inside")])
def test_the_planner_places_by_what_leaves_a_node(batch: int, placement: str) -> None:
    plan = planned(*OWN[:-1], NODES, *TWICE, f"data.batch_size={batch}", "plan.node=2")
    assert plan.placement == placement
    [note] = [note for note in plan.notes if note.startswith("placement")]
    assert note.startswith(f"placement {placement}: a step is planned to take ")
    assert not any("placement" in note for note in planned(*OWN[:-1], NODES, *TWICE, "plan.node=4").notes[1:])


class OnNodes(Context):
    """Describes rank 0 of processes on two nodes."""

    nodes = ("a", "a", "b", "b")

    def decide(self, name: str, own: str, choose: Callable[[list[str]], str], seconds: float = 0.0) -> str:
        return choose([*self.nodes])


@pytest.mark.parametrize(("nodes", "placement"), [("aabb", "replicas_inside"), ("aaaa", "pipeline_inside")])
def test_a_run_on_several_nodes_asks_the_planner(nodes: str, placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(OnNodes, "nodes", tuple(nodes))
    context = OnNodes(0, 4, 0, Path(), dist.HashStore, said.append, lambda: False)
    config = composed(EVEN, *ZEROS, "task._target_=own_plan.OwnTask", *TWICE)
    assert with_placement(context, config)["pipeline"]["placement"] == placement
    assert [event["text"].partition(":")[0] for event in said] == [f"placement {placement}"] * (nodes == "aabb")


@pytest.mark.slow
def test_the_placement_changes_no_bit(tmp_path: Path) -> None:
    """Two nodes of two processes each, beside four workers of one command."""
    job = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [*SHORT, "pipeline.placement=replicas_inside"]

    def start(rank: int) -> str:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)}
        return succeeded(command("train", *words, f"hydra.run.dir={tmp_path / 'nodes'}", **job, **place))

    with ThreadPoolExecutor(4) as together:
        said = "".join(together.map(start, range(4)))
    assert said.count("placement replicas_inside: as typed") == 1
    succeeded(command("train", *words, f"hydra.run.dir={tmp_path / 'machine'}"))
    assert same_end(tmp_path / "nodes", tmp_path / "machine")
