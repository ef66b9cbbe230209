"""Tests that links in folders of data are followed, and that one that leads nowhere is refused wherever it lies."""

from __future__ import annotations

import shutil
from pathlib import Path

import parallel_folder
import pytest
import tiny_images
from image_tars import write_shards
from text_sources import refusal_of

from gpipe_cli.data.parallel.source import ParallelTextSource
from gpipe_cli.data.text.source import TextFilesSource
from gpipe_cli.data.tree import files_below


def test_links_are_followed_into_other_folders_and_never_in_a_circle(tmp_path: Path) -> None:
    for name in ("root/a/1.txt", "root/b.txt", "disk/2.txt", "disk/.hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for link, target in (("root/a/disk", "../../disk"), ("root/a/up", ".."), ("disk/self", "."), ("root/b", "a")):
        (tmp_path / link).symlink_to(target)
    (tmp_path / "root" / "gone.bak").symlink_to("/nowhere")  # no text: passed over
    root = tmp_path / "root"
    found = [Path(file).relative_to(root).as_posix() for file in files_below(root, lambda name: name.endswith(".txt"))]
    assert found == ["a/1.txt", "a/disk/2.txt", "b/1.txt", "b/disk/2.txt", "b.txt"]


DEAD = {  # what becomes a link that leads nowhere
    "a text": "text/a.txt",
    "a folder of text": "text/more",
    "text itself": "text",
    "a side of parallel text": "parallel/train.de",
    "a language": "parallel/de-en",
    "an image": "images/train/n00000001/n00000001_1.JPEG",
    "a class": "images/train/n0.3",
    "a split": "images/val",
    "a shard": "shards/birds-train-0001.tar",
}


@pytest.mark.parametrize("what", DEAD)
def test_a_link_that_leads_nowhere_is_refused_by_its_name_and_target(what: str, tmp_path: Path) -> None:
    parallel_folder.plain(tmp_path / "parallel", dev="dev")
    parallel_folder.write(tmp_path / "text" / "a.txt", ["one", "", "two"])
    tiny_images.image_folder(tmp_path / "images")
    (tmp_path / "shards").mkdir()
    for split in ("train", "val"):
        write_shards(tmp_path / "images" / split, tmp_path / "shards" / f"birds-{split}", 6)
    link = tmp_path / DEAD[what]
    shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
    link.symlink_to("/not/mounted")
    root, kinds = tmp_path / Path(DEAD[what]).parts[0], {"text": TextFilesSource, "parallel": ParallelTextSource}
    said = refusal_of(kinds[root.name], root, {}) if root.name in kinds else tiny_images.refusal(root)
    assert f"{link} links to /not/mounted, which is not there: mount it, or remove the link" in said
