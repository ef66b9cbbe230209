"""Reads weights made elsewhere: one file, or a folder as the transformers library saves it. Loading runs no code.

The first half imports no torch: the command finds the files before it starts workers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from ..disk import refuse_pointer
from ..json_files import read_json
from .files import CheckpointError, matches_any, shorten

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
NAMES = ("model.safetensors", "pytorch_model.bin", "model.pt")  # in a folder, also with an index of several files
LISTED = 8  # patterns in a message
# Keys under which a .pt file may hold the weights.
WRAPPED = ("state_dict", "model", "model_state_dict", "params", "net", "module")
# Of replicated, compiled and checkpointed modules, also below Lightning's model.
WRAPPERS = re.compile(r"^(?:(?:model\.)?(?:module|_orig_mod)\.)+|(?<=\.)(?:_orig_mod|_checkpoint_wrapped_module)\.")


# -- which files -------------------------------------------------------------------------------------------------------


def weight_files(path: Path) -> list[Path]:
    """Returns the files of weights made elsewhere at a path: one file, or those of a folder with one of `NAMES`.

    A run has none, even if `gpipe-export` has written such a file into it.

    Raises:
        CheckpointError: a file is missing, or of another kind.
    """
    is_run = (path / "checkpoints").is_dir() or (path / "manifest.json").is_file()
    # A single file before its index, as transformers does.
    places = [path, *(path / form for name in NAMES for form in (name, f"{name}.index.json"))]
    found = [] if is_run else [place for place in places if place.is_file()][:1]
    if found and found[0].suffix == ".json":
        found = [path / name for name in sorted(set(read_json(found[0], WeightIndex)["weight_map"].values()))]
    for file in found:
        if file.suffix not in SUFFIXES:
            raise CheckpointError(f"{file} holds no weights by its name: expected {', '.join(SUFFIXES)}, or a run")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, but {path} names it in its index")
    return found


class WeightIndex(TypedDict):
    """Describes an index as the transformers library writes it: which file holds each tensor."""

    weight_map: dict[str, str]


# -- what is in them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedTensor:
    """Describes a saved tensor: its shape, and the function that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def open_foreign(path: Path, warn: Callable[[str], None]) -> dict[str, SavedTensor]:
    """Returns all tensors at a path by name; their values are read later (`SavedTensor.read`).

    Args:
        warn: receives a line about further weights in a file, such as averaged ones, which are not used.

    Raises:
        CheckpointError: a file is missing or damaged, or would run code.
    """
    found: dict[str, SavedTensor] = {}
    for file in weight_files(path):
        refuse_pointer(file)
        found |= open_safetensors(file) if file.suffix == ".safetensors" else _of_torch(file, warn)
    if not found:
        raise CheckpointError(f"{path} holds no tensors")
    return found


def open_safetensors(file: Path) -> dict[str, SavedTensor]:
    """Returns the tensors of one safetensors file by name, unread.

    Raises:
        CheckpointError: the file is of another kind, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(file, framework="pt", device="cpu")  # as long as one of its tensors may be read
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in list(opened.keys())}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is no safetensors file, or a damaged one ({error})") from error
    return {name: SavedTensor(shape, partial(opened.get_tensor, name)) for name, shape in shapes.items()}


def _of_torch(file: Path, warn: Callable[[str], None]) -> dict[str, SavedTensor]:
    """Returns the tensors of a file that torch.save wrote: a state_dict, perhaps below one of the keys `WRAPPED`."""
    import torch

    try:
        content = torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251
    except Exception as error:  # torch raises errors of many kinds for a damaged file
        raise CheckpointError(
            f"{file} is damaged, or holds more than weights, which could run code: save model.state_dict(), or a "
            f"safetensors file ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error

    found = state_dicts_in(content)
    usable = [key for key in found if {*key.split(".")} <= {"", *WRAPPED}]
    if not usable:
        keys = f": save one of {shorten([*map(str, content)])} alone" if isinstance(content, Mapping) else ""
        raise CheckpointError(f"{file} is no state_dict, which holds tensors by their names{keys}")
    used = min(usable, key=lambda key: [WRAPPED.index(part) for part in key.split(".") if part])
    if others := [key for key in found if key != used]:
        warn(
            f"{file} holds weights under {used}, which are used, and under {', '.join(others)}, which are not: "
            "to begin with those, save them alone"
        )
    return {name: SavedTensor(tuple(tensor.shape), tensor.detach) for name, tensor in found[used].items()}


def state_dicts_in(value: object, key: str = "") -> dict[str, Mapping[str, Tensor]]:
    """Returns the state_dicts in what a file holds, by dotted key; "" is the key of the whole.

    Tensors deeper in it count only if a name has a dot: those of an optimizer have none.
    """
    import torch

    if not isinstance(value, Mapping) or not value:
        return {}
    if all(isinstance(tensor, torch.Tensor) for tensor in value.values()):
        return {key: value} if "." not in key or any("." in str(name) for name in value) else {}
    found: dict[str, Mapping[str, Tensor]] = {}
    for name, part in value.items():
        found |= state_dicts_in(part, f"{key}.{name}" if key else str(name))
    return found


# -- how it fits a model -----------------------------------------------------------------------------------------------


def match_names(
    model: Mapping[str, Sequence[int]],
    saved: Mapping[str, SavedTensor],
    aliases: Iterable[Collection[str]],
    left_out: Sequence[str],
    path: Path,
) -> dict[str, str]:
    """Returns for each tensor of the model the name of the saved one that it begins with, without those left out.

    All saved names may lack a first part that the model's have (``model.``), or have one more (``module.``).

    Args:
        model: the shape of each parameter and persistent buffer.
        aliases: groups of the model's names that mean one tensor; one name of a group is enough in the file.
        left_out: `checkpoint.init_except`: patterns of names in the model or in the file.

    Raises:
        CheckpointError: a name is missing, unknown, or of another shape; the message lists them all.
    """
    taken = {name: saved_name for saved_name, name in _renamed(model, saved, path).items() if name in model}
    for group in aliases:
        if given := next((taken[name] for name in group if name in taken), None):
            _refuse_untied([taken[n] for n in group if n in taken and not matches_any(n, left_out)], saved, path)
            taken |= dict.fromkeys((name for name in group if name in model and name not in taken), given)
    wanted = [name for name in model if not matches_any(name, left_out)]
    known = set(taken.values())
    shapes = {
        name: f"{name} is {list(saved[taken[name]].shape)}, this model's {list(model[name])}"
        for name in wanted
        if name in taken and saved[taken[name]].shape != tuple(model[name])
    }
    faults = {
        "names of this model are not in it": {name: name for name in wanted if name not in taken},
        "of its names are not in this model": {
            name: name for name in saved if name not in known and not matches_any(name, left_out)
        },
        "have other shapes": shapes,
    }
    if any(faults.values()):
        said = [f"{len(names):,} {what}: {shorten([*names.values()])}" for what, names in faults.items() if names]
        # One pattern for names that differ in numbers only.
        differing = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for names in faults.values() for name in names)
        patterns = [*left_out, *differing]
        words = ",".join(patterns[:LISTED]) + (",…" if len(patterns) > LISTED else "")
        raise CheckpointError(
            f"{path} does not fit this model:\n"
            + "\n".join(said)
            + "\nGive the model's settings (model.*) that fit. Or leave these names out, and let the model's begin "
            + f"anew: checkpoint.init_except=[{words}]"
        )
    return {name: taken[name] for name in wanted}


def _refuse_untied(names: Sequence[str], saved: Mapping[str, SavedTensor], path: Path) -> None:
    """Refuses saved values that differ for several names of one tensor of the model.

    Raises:
        CheckpointError: it names two of them.
    """
    import torch

    for first, name in pairwise(names):
        if name != first and not torch.equal(saved[name].read(), saved[first].read()):
            raise CheckpointError(
                f"{path} has other values for {first} than for {name}, which are one tensor of this model: untie them, "
                "by a setting such as tie_word_embeddings=false"
            )


def _renamed(model: Collection[str], saved: Collection[str], path: Path) -> dict[str, str]:
    """Returns saved name -> name in the model: the same, or with one first part more or less if more names then fit.

    So a file of `encoder.weight` fits a model of `model.encoder.weight`, and the other way round. Parts that torch's
    wrappers put into names, such as ``module._orig_mod.``, are dropped.

    Raises:
        CheckpointError: the file holds the whole model twice, under other first parts.
    """
    known, bare = set(model), {name: WRAPPERS.sub("", name) for name in saved}
    first_parts = sorted({f"{name.partition('.')[0]}." for name in model})
    saved_first_parts = sorted({f"{name.partition('.')[0]}." for name in bare.values() if "." in name})
    candidates = [{name: name for name in saved}, bare]
    candidates += [{name: own if own in known else part + own for name, own in bare.items()} for part in first_parts]
    candidates += [{name: own.removeprefix(part) for name, own in bare.items()} for part in saved_first_parts]
    # Two candidates that have all names of the model, from other saved names, are two models in one file.
    reversed_candidates = [{own: name for name, own in candidate.items() if own in known} for candidate in candidates]
    whole = [found for found in reversed_candidates if len(found) == len(known)]
    if other := next((found for found in whole if found != whole[0]), None):
        name = next(own for own in other if other[own] != whole[0][own])
        raise CheckpointError(
            f"{path} holds this model more than once, as {whole[0][name]} and {other[name]}: save the one alone that "
            "the run is to begin with"
        )
    return max(candidates, key=lambda candidate: len(known.intersection(candidate.values())))  # the first of equal ones
