"""Keeps tensors of the model's size in files, one for each layer, so that gpipe-verify needs memory for a cell only."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


class Spill:
    """Keeps tensors in files of a folder that all workers share.

    Tensors belong to a moment, such as "after step 2", and a layer.

    Args:
        folder: made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, moment: str, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes the tensors of one layer."""
        folder = self._folder / moment
        folder.mkdir(parents=True, exist_ok=True)
        own = {  # copies, because a file holds neither shared memory nor unusual strides
            name: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        save_file(own, self._path(moment, layer))

    def get(self, moment: str, layer: int) -> dict[str, Tensor]:
        """Returns the tensors of one layer; none where nothing was written."""
        path = self._path(moment, layer)
        return load_file(path) if path.exists() else {}

    def drop(self, moment: str) -> None:
        """Deletes the files of a moment, if there are any."""
        shutil.rmtree(self._folder / moment, ignore_errors=True)

    def close(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, moment: str, layer: int) -> Path:
        return self._folder / moment / f"{layer}.safetensors"
