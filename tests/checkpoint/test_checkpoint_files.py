"""Tests that a kill or a damaged file costs at most one save, and which checkpoint a run goes on from."""

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from checkpoint_tools import Layers, make_layers, restore, save
from own_model import WORDS, layers
from run_files import bytes_of, rows

from gpipe_cli.checkpoint import files as checkpoint_files
from gpipe_cli.checkpoint import writer as checkpoint_writer
from gpipe_cli.checkpoint.files import CheckpointError, NewerFormat, RunState
from gpipe_cli.checkpoint.layer_state import layer_state, load_layer
from gpipe_cli.checkpoint.writer import CheckpointWriter
from gpipe_cli.commands import train
from gpipe_cli.data.images.digits import DigitsSource
from gpipe_cli.data.source import Batch
from gpipe_cli.jobs.run_directory import require_writable
from gpipe_cli.layers import LayerBuilder


def layer_file(run_dir: Path, step: int, layer: str) -> Path:
    return checkpoint_files.layer_path(checkpoint_files.step_directory(run_dir, step), layer)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_worker_reads_only_the_files_of_its_own_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that rank 0 had to read would take hours: 72 GB for six billion parameters."""
    opened: list[str] = []

    def noted(path: Path) -> str:
        opened.append(unquote(path.name.partition(".safetensors")[0]))
        return sha256_of(path)

    monkeypatch.setattr(checkpoint_files, "sha256_of", noted)
    layers, cells = make_layers(), [["embed", "block/1"], ["relu", "head"]]
    writers = [CheckpointWriter(tmp_path, worker, [*layers]) for worker in range(2)]
    for writer, own in zip(writers, cells, strict=True):
        writer.begin(1, {name: layer_state(layers[name], None) for name in own})
        writer.wait()
    info = writers[0].commit(1, RunState(), workers=2)
    assert checkpoint_files.latest(tmp_path)[0] == info
    assert opened == [*cells[0], *cells[1]]
    load_layer(info, "head")
    assert opened[4:] == ["head"]


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


SUMS, sha256_of = count(), checkpoint_files.sha256_of


def die_at_the_second_layer(path: Path) -> str:
    if next(SUMS):
        die()
    return sha256_of(path)


def die_after_the_rename(path: Path, target: Path, rename: Any = Path.rename) -> None:
    die(rename(path, target))


def die_in_the_middle_of_it(folder: Path, **_: object) -> None:
    next(Path(folder).rglob("*.safetensors")).unlink()
    die()


KILLS: dict[str, tuple[Any, str, Callable[..., Any], int]] = {  # what kills while step 2 is saved, what is left
    "layer file": (checkpoint_files, "sha256_of", die_at_the_second_layer, 1),
    "part": (checkpoint_writer, "part_path", die, 1),
    "manifest": (checkpoint_writer, "write_manifest", die, 1),
    "rename": (Path, "rename", die, 1),
    "renamed": (Path, "rename", die_after_the_rename, 2),
    "pruning": (checkpoint_writer.shutil, "rmtree", die_in_the_middle_of_it, 2),
}


def save_and_die(run_dir: Path, point: str) -> None:
    save(run_dir, 1, make_layers(), keep=1, best=1)
    setattr(*KILLS[point][:3])
    save(run_dir, 2, make_layers(), keep=1, best=2)


@pytest.mark.parametrize("point", KILLS)
def test_a_kill_at_any_point_of_saving_leaves_a_complete_checkpoint_and_the_best(point: str, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=save_and_die, args=(tmp_path, point))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    found, warnings = checkpoint_files.latest(tmp_path)
    layers, survivor = make_layers(), KILLS[point][3]
    assert found is not None and not warnings
    assert found.step == survivor
    restore(found, layers, None)

    checkpoint_writer.prepare_directory(tmp_path, found)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names - {"step_00000001"} == {f"step_{survivor:08d}"} - {"step_00000001"}
    assert save(tmp_path, 3, layers, keep=1, best=survivor).step == 3
    assert kept_steps(tmp_path) == [checkpoint_files.best_step(tmp_path), 3] == [survivor, 3]


def test_all_is_on_disk_before_a_checkpoint_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds the order that a crash of the machine needs: contents and folders first, then the name, then its folder."""
    flushed: set[int] = set()
    unflushed: list[Path] = []
    fsync, rename = os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def checked(path: Path, target: Path) -> Path:
        unflushed.extend(inside for inside in (path, *path.rglob("*")) if inside.stat().st_ino not in flushed)
        flushed.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", checked)
    (tmp_path / "run").mkdir()
    checkpoint_writer.prepare_directory(tmp_path / "run", None)
    assert {folder.stat().st_ino for folder in (tmp_path, tmp_path / "run")} <= flushed
    save(tmp_path / "run", 1, make_layers())
    assert unflushed == [] and (tmp_path / "run" / "checkpoints").stat().st_ino in flushed


def two_checkpoints(run_dir: Path) -> Layers:
    layers = make_layers()
    save(run_dir, 1, layers)
    save(run_dir, 2, layers)
    return layers


@pytest.mark.parametrize(
    ("damage", "path", "message"),
    [
        (cut_short, "layers/head.safetensors", r"head\.safetensors has \d+ bytes instead of \d+"),
        (Path.unlink, "layers/head.safetensors", r"head\.safetensors is missing"),
        (cut_short, "manifest.json", r"manifest\.json is damaged"),
        (Path.unlink, "manifest.json", r"manifest\.json cannot be read: No such file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_file_is_not_used(damage: Callable[[Path], None], path: str, message: str, tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    damage(tmp_path / "checkpoints" / "step_00000002" / path)
    found, (warning,) = checkpoint_files.resolve("auto", tmp_path)
    assert found is not None and found.step == 1
    assert re.search(message, warning) and "using step_00000001" in warning


def test_the_checkpoints_of_a_run_may_lie_on_a_scratch_disk(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "of others.tmp").touch()
    run.mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "scratch")
    require_writable("hydra.run.dir", run)
    two_checkpoints(run)
    checkpoint_writer.prepare_directory(run, checkpoint_files.find(run / "checkpoints" / "step_00000001")[0])
    save(run, 2, make_layers())
    assert (tmp_path / "scratch" / "of others.tmp").exists()
    cut_short(layer_file(run, 2, "head"))
    with pytest.raises(CheckpointError, match=r"run/checkpoints/step_00000002 cannot be used: .*head\.safetensors has"):
        checkpoint_files.resolve(run / "checkpoints" / "step_00000002", tmp_path / "new")


def test_a_run_with_only_damaged_checkpoints_is_an_error_not_a_new_beginning(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    for step in (1, 2):
        layer_file(tmp_path, step, "embed").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used .*embed\.safetensors is missing"):
        checkpoint_files.resolve("auto", tmp_path)


def test_a_flipped_bit_is_found_by_the_worker_that_loads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = [*WORDS, "pipeline.K=1", "checkpoint.every=2", "launch.inline=true", f"hydra.run.dir={run}"]
    assert train.main([*words, "trainer.steps=4"]) == 0
    flip_last_bit(layer_file(run, 4, "last"))
    assert train.main([*words, "trainer.steps=6", "checkpoint.resume=auto"]) == 2
    said = r"last\.safetensors is damaged: its SHA-256 is not the manifest's"
    assert re.search(rf"{said}\. Use .*step_00000002 instead", capsys.readouterr().err)
    named = checkpoint_files.step_directory(run, 2)
    assert train.main([*words, "trainer.steps=6", f"checkpoint.resume={named}"]) == 0
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def own_layers(limit: float = 1.0) -> list[LayerBuilder]:
    return layers()


class Numbered(DigitsSource):
    """Has positions that are no JSON."""

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        for number, batch in enumerate(super().train(None, M, replica, replicas)):
            yield replace(batch, position=np.int64(number))


class Placed(DigitsSource):
    """Has positions of another form than its parent's."""

    def train(self, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        return super().train(None if position is None else position["place"], M, replica, replicas)


OWN = [*WORDS, "model._target_=test_checkpoint_files.own_layers", "pipeline.K=1", "launch.inline=true"]


def test_a_configuration_that_holds_infinity_is_read_again(tmp_path: Path) -> None:
    words = [*OWN, "+model.limit=inf", f"hydra.run.dir={tmp_path}", "checkpoint.resume=auto"]
    for steps in (1, 2):
        assert train.main([*words, f"trainer.steps={steps}"]) == 0
    assert len(rows(tmp_path / "metrics.jsonl")) == 2


def test_a_value_that_no_checkpoint_can_hold_is_refused_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "bytes.yaml").write_text(
        "# @package _global_\nmodel:\n  limit: !!binary aGVsbG8=\n"
    )
    binary = ["--config-dir", str(tmp_path / "conf"), "experiment=bytes", f"hydra.run.dir={tmp_path / 'one'}"]
    assert train.main([*OWN, *binary]) == 2
    assert "no checkpoint can hold this value" in capsys.readouterr().err and not (tmp_path / "one").exists()
    source = "data._target_=test_checkpoint_files.Numbered"
    assert train.main([*OWN, source, f"hydra.run.dir={tmp_path / 'two'}"]) == 2
    assert "the position of a mini-batch=0: no checkpoint can hold this value" in capsys.readouterr().err


def test_a_place_in_other_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*OWN, "checkpoint.resume=auto", "checkpoint.allow_changes=[data]", f"hydra.run.dir={tmp_path}"]
    assert train.main([*words, "trainer.steps=1"]) == 0
    source = "data._target_=test_checkpoint_files.Placed"
    assert train.main([*words, source, "trainer.steps=2"]) == 2
    assert "data_position, {epoch:0,batch:1}, is none that" in capsys.readouterr().err


def test_a_checkpoint_of_a_newer_format_is_refused_and_not_touched(tmp_path: Path) -> None:
    newer = checkpoint_files.FORMAT + 1
    two_checkpoints(tmp_path)
    manifest = checkpoint_files.step_directory(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps({"format": newer}))
    before = bytes_of(tmp_path)
    step_1 = checkpoint_files.open_checkpoint(tmp_path / "checkpoints" / "step_00000001")
    said = rf"step_00000002/manifest\.json has format {newer}"
    with pytest.raises(NewerFormat, match=said):
        checkpoint_files.resolve("auto", tmp_path)
    with pytest.raises(NewerFormat, match=said):  # not even where the run would go on from an older one
        checkpoint_files.refuse_another_run(tmp_path, step_1)
    assert bytes_of(tmp_path) == before


def kept_steps(run_dir: Path) -> list[int]:
    return [checkpoint_files.step_of(path) for path in checkpoint_files.step_directories(run_dir)]


def test_the_two_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    layers = make_layers()
    for step in range(1, 6):
        save(tmp_path, step, layers, best=min(step, 2))
    assert kept_steps(tmp_path) == [2, 4, 5]
    assert checkpoint_files.best_step(tmp_path) == 2


def test_pruning_does_not_count_a_damaged_checkpoint(tmp_path: Path) -> None:
    layers = two_checkpoints(tmp_path)
    layer_file(tmp_path, 2, "head").unlink()
    save(tmp_path, 3, layers)
    assert kept_steps(tmp_path) == [1, 2, 3]


def test_a_fresh_run_does_not_mix_its_checkpoints_with_another_runs(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=r"the newest of step 2, .*type checkpoint\.resume="):
        checkpoint_writer.prepare_directory(tmp_path, None)


def test_going_back_sets_later_checkpoints_aside_until_the_next_save(tmp_path: Path) -> None:
    layers = make_layers()
    for step in (10, 20, 30):
        save(tmp_path, step, layers, keep=3, best=step)
    info = checkpoint_files.resolve(tmp_path / "checkpoints" / "step_00000010", tmp_path)[0]
    checkpoint_writer.prepare_directory(tmp_path, info)
    assert kept_steps(tmp_path) == [10]
    assert checkpoint_files.best_step(tmp_path) == 10
    assert (tmp_path / "checkpoints" / "step_00000030.discarded").is_dir()
    save(tmp_path, 15, layers)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")) == ["step_00000010", "step_00000015"]


def test_auto_takes_the_run_that_saved_last(tmp_path: Path) -> None:
    for step, name in enumerate(("2026-01-01/10-00-00", "other", "2026-01-02/09-00-00"), start=1):
        info = save(tmp_path / name, step, make_layers())
        os.utime(info.path / "manifest.json", (1000 + step, 1000 + step))
    found = checkpoint_files.resolve("auto", tmp_path / "new", tmp_path)[0]
    assert found is not None and found.step == 3


@pytest.mark.parametrize("suffix", ["", "checkpoints/step_00000002"])
def test_a_run_or_one_of_its_checkpoints_can_be_given(suffix: str, tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    found = checkpoint_files.resolve(str(tmp_path / suffix), tmp_path / "new")[0]
    assert found is not None and found.step == 2
