"""Tests what every source promises: equal batches from any position, equal division, links that are followed."""

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import parallel_folder
import pytest
import text_sources
import tiny_images
import torch
from refusals import refusal_of
from tiny_images import write_shards
from torch.utils.data import Dataset

from gpipe_cli.data.cldr.source import TextSource, TranslationSource
from gpipe_cli.data.images.digits import DigitsSource
from gpipe_cli.data.images.source import ImageSource
from gpipe_cli.data.parallel.source import ParallelTextSource
from gpipe_cli.data.sampling import temperature_shares
from gpipe_cli.data.source import Batch, no_report
from gpipe_cli.data.text.source import TextFilesSource
from gpipe_cli.data.torch_datasets import DatasetSource
from gpipe_cli.data.tree import files_below
from gpipe_cli.errors import ConfigurationError

SMALL: dict[str, Any] = {"languages": ["de", "fi", "yrl"], "largest": 400, "smallest": 100, "vocabulary": 600}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("corpus"))


class Numbers(Dataset[Any]):
    """Holds examples (i + noise, i), with noise from every global generator, as in augmentation."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index + random.random() + float(np.random.rand()) + float(torch.rand(()))]), index


def prepared(source: Any) -> Any:
    source.prepare(no_report)
    return source


def translation(cache: str, **changes: Any) -> TranslationSource:
    return prepared(TranslationSource(**{**SMALL, "batch_size": 10, "cache_dir": cache, **changes}))


def text(cache: str, **changes: Any) -> TextSource:
    return prepared(TextSource(**{**SMALL, "sequence_length": 32, "batch_size": 10, "cache_dir": cache, **changes}))


def examples(cache: str, **changes: Any) -> DatasetSource:
    return DatasetSource(**{"train": Numbers(47), "evaluation": Numbers(23), "batch_size": 10, **changes})


def images(cache: str, **changes: Any) -> ImageSource:
    root = Path(cache) / "images"
    if not root.exists():
        tiny_images.image_folder(root)
    settings = {"classes": 3, "root": str(root), "image_size": 16, "batch_size": 10, "workers": 0}
    settings |= {"crop_area": (0.3, 1.0), "brightness": 0.1, "chroma": 0.1, "cutout": 0.25}
    return prepared(ImageSource("image_folder", **{**settings, **changes}))


def digits(cache: str) -> DigitsSource:
    return prepared(DigitsSource(batch_size=10, image_size=8))


SOURCES = [translation, text, examples, images, digits]
every_source = pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)


def first(batches: Iterator[Batch], count: int) -> list[Batch]:
    return list(islice(batches, count))


def rows(batch: Batch, column: int = 0) -> list[list[float]]:
    """Returns one tensor's rows over all micro-batches, without padding."""
    tensors = [(*inputs, *targets)[column] for inputs, targets in batch.micro_batches]
    return [[value for value in row.reshape(-1).tolist() if value != 0] for tensor in tensors for row in tensor]


# --- every source


@every_source
@pytest.mark.parametrize("stop", [1, 17, 64, 65])
def test_resuming_goes_on_as_if_never_stopped(make: Any, cache: str, stop: int) -> None:
    whole = first(make(cache).train(None, 2, 0, 1), stop + 3)
    rest = first(make(cache).train(whole[stop - 1].position, 2, 0, 1), 3)
    assert [rows(batch) for batch in rest] == [rows(batch) for batch in whole[stop:]]


@every_source
def test_micro_batches_are_the_same_examples_in_the_same_order_as_one(make: Any, cache: str) -> None:
    whole, divided = (first(make(cache).train(None, count, 0, 1), 8) for count in (1, 4))
    assert [rows(batch) for batch in whole] == [rows(batch) for batch in divided]


@every_source
def test_replicas_divide_the_mini_batch_of_one(make: Any, cache: str) -> None:
    whole = next(make(cache).train(None, 6, 0, 1))
    thirds = [next(make(cache).train(None, 2, replica, 3)) for replica in range(3)]
    assert [row for third in thirds for row in rows(third)] == rows(whole)
    assert {str(third.position) for third in thirds} == {str(whole.position)}


@every_source
def test_too_many_micro_batches_name_the_key_to_raise(make: Any, cache: str) -> None:
    with pytest.raises(ConfigurationError, match=r"12 micro-batches .*pipeline\.M=6 × 2 replicas.*data\.batch_size"):
        make(cache).train(None, 6, 0, 2)


@every_source
def test_an_evaluation_is_the_same_set_for_any_number_of_micro_batches(make: Any, cache: str) -> None:
    one, three = ([row for batch in make(cache).evaluation(M) for row in rows(batch)] for M in (1, 3))
    assert sorted(one) == sorted(three)


@every_source
def test_epochs_count_how_often_the_data_was_read(make: Any, cache: str) -> None:
    source = make(cache)
    positions = [None, *(batch.position for batch in first(source.train(None, 2, 0, 1), 200))]
    epochs = [source.epoch(position) for position in positions]
    assert epochs[0] == 0 and np.diff(epochs) == pytest.approx(epochs[1]) and epochs[1] > 0


# --- translation


def test_a_micro_batch_of_pairs_has_beginning_and_end_tokens_where_the_model_expects_them(cache: str) -> None:
    source = translation(cache)
    ((source_ids, target_in), (target_out,)) = next(source.train(None, 1, 0, 1)).micro_batches[0]
    lengths = (target_out != source.pad_id).sum(1)
    assert source_ids.dtype == target_in.dtype == target_out.dtype == torch.int64
    assert target_in.shape == target_out.shape and target_in.shape[1] % 8 == source_ids.shape[1] % 8 == 0
    assert (target_in[:, 0] == source.bos_id).all()
    assert all(row[length - 1] == source.eos_id for row, length in zip(target_out, lengths, strict=True))
    assert all((a[1:n] == b[: n - 1]).all() for a, b, n in zip(target_in, target_out, lengths, strict=True))
    assert ((source_ids == source.eos_id).sum(1) == 1).all()


def test_held_out_samples_decode_to_their_reference(cache: str) -> None:
    source = translation(cache)
    samples = source.held_out("dev", per_language=20)
    assert Counter(sample.language for sample in samples) == {"de": 20, "fi": 20, "yrl": 20}
    assert all(sample.source_ids[-1] == source.eos_id for sample in samples)
    assert source.decode([5, source.eos_id, 6]) == source.decode([5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"batch_size": None}, r"data\.batch_tokens"), ({"languages": ["xx"]}, r"data\.languages: no language 'xx'")],
)
def test_a_wrong_value_names_its_key_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TranslationSource(**{**SMALL, **changes})


# --- examples


@pytest.mark.parametrize(("make", "workers"), [(examples, 1), (examples, 2), (images, 2)])
def test_order_and_augmentation_do_not_depend_on_loader_processes(make: Any, cache: str, workers: int) -> None:
    here, there = (first(make(cache, workers=count).train(None, 3, 0, 1), 9) for count in (0, workers))
    assert [rows(batch) for batch in here] == [rows(batch) for batch in there]
    assert [batch.position for batch in here] == [batch.position for batch in there]


@pytest.mark.parametrize("make", [examples, images])
def test_replicas_may_share_an_evaluation_without_reading_an_example_twice(make: Any, cache: str) -> None:
    source = make(cache, batch_size=2)
    every = [rows(batch) for batch in source.evaluation(1)]
    for replica in (0, 1):
        assert [rows(batch) for batch in source.evaluation_share(1, replica, 2)] == every[replica::2]


@pytest.mark.parametrize(("make", "count"), [(images, 6), (digits, 360)])
def test_a_micro_batch_of_images_is_bytes_of_three_channels_and_int64_labels(make: Any, count: int, cache: str) -> None:
    (inputs,), (labels,) = next(make(cache).train(None, 2, 0, 1)).micro_batches[0]
    assert (inputs.dtype, inputs.shape[:2], labels.dtype, len(labels)) == (torch.uint8, (5, 3), torch.int64, 5)
    assert sum(len(rows(batch)) for batch in make(cache).evaluation(2)) == count


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [10, 10, 10, 10, 10]), (False, [10, 10, 10, 10, 7])])
def test_an_epoch_has_every_example_once_or_drops_the_last(cache: str, drop_last: bool, sizes: list[int]) -> None:
    batches = first(examples(cache, drop_last=drop_last).train(None, 2, 0, 1), 5)
    assert [len(rows(batch)) for batch in batches] == sizes
    seen = [int(target) for batch in batches for _, (targets,) in batch.micro_batches for target in targets]
    assert drop_last or sorted(seen) == [*range(47)]


def test_a_last_batch_too_small_for_its_micro_batches_is_refused_before_training(cache: str) -> None:
    with pytest.raises(ConfigurationError, match=r"7 examples .*8 micro-batches.*data\.drop_last"):
        examples(cache, drop_last=False).train(None, 8, 0, 1)


def test_tuples_of_inputs_become_several_tensors(cache: str) -> None:
    pairs: Any = [((torch.ones(2), torch.zeros(3)), i) for i in range(10)]
    inputs, targets = next(examples(cache, train=pairs).train(None, 1, 0, 1)).micro_batches[0]
    assert [tuple(tensor.shape) for tensor in (*inputs, *targets)] == [(10, 2), (10, 3), (10,)]


def test_an_example_that_is_no_pair_is_named(cache: str) -> None:
    singles: Any = [torch.ones(2)] * 10
    with pytest.raises(ConfigurationError, match=r"not \(input, target\) but Tensor.*data\.collate"):
        next(examples(cache, train=singles).train(None, 1, 0, 1))


# --- helpers


def test_shares_follow_the_formula() -> None:
    assert temperature_shares([100, 1], 1.0).tolist() == pytest.approx([100 / 101, 1 / 101])
    assert temperature_shares([32, 1], 5.0).tolist() == pytest.approx([2 / 3, 1 / 3])


def test_loader_processes_alone_read_examples(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a data set opens at its first example would be shared by all processes forked afterwards."""
    read: list[int] = []  # by this process
    monkeypatch.setattr(Numbers, "__getitem__", lambda _, index: read.append(index) or (torch.zeros(1), index))
    source = examples(cache, workers=1)
    next(source.train(None, 2, 0, 1))
    assert [len(batch.micro_batches) for batch in source.evaluation(2)] == [2, 2, 2]
    assert read == []
    next(examples(cache).train(None, 2, 0, 1))
    assert len(read) >= 5


# -- links in folders of data ----------------------------------------------------------------------------------------


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
    "a folder of text": "text/more",
    "a side of parallel text": "parallel/train.de",
    "an image": "images/train/n00000001/n00000001_1.JPEG",
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
    root = tmp_path / Path(DEAD[what]).parts[0]
    kind = {"text": TextFilesSource, "parallel": ParallelTextSource}.get(root.name)
    said = refusal_of(text_sources.prepared, kind, root, {}) if kind else tiny_images.refusal(root)
    assert f"{link} links to /not/mounted, which is not there or unreadable: mount it, or remove the link" in said
