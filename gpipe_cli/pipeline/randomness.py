"""Seeds every random number of a run by its purpose.

What a `_target_` makes comes from (seed, section), initial weights from (seed, layer), dropout and drop path from
(seed, step, replica, micro-batch, layer). So they do not depend on K, on the worker or on earlier random numbers, and
recompute (paper, section 2.3) draws the same numbers again without any stored generator state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from struct import pack, unpack

import numpy as np
import torch

from ..gpus import GPU

WEIGHTS, NOISE, SECTION = 1, 2, 3  # purposes of a seed, so that no two coincide
_TOGETHER = 8  # seeds of eight bytes in the longest digest of blake2b


def derive_seed(*numbers: int) -> int:
    """Returns a 63-bit seed made of 64-bit integers; any change of any of them gives an unrelated seed."""
    digest = blake2b(pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seeds the default generators of torch's CPU, numpy and Python by these numbers; restores them afterwards."""
    seed = derive_seed(*numbers)
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def weights_of_layer(seed: int, layer: int) -> AbstractContextManager[None]:
    """Returns the context in which layer number ``layer`` is built: `seeded` for its initial weights."""
    return seeded(WEIGHTS, seed, layer)


class NoiseSource:
    """Seeds the generators that a layer may draw from, before it runs.

    Args:
        seed: of the run.
        replica: 0 … D−1.
        device: where the layers run. They use its default generator, or the CPU's, as a layer does that calls
            ``torch.rand(())``.
    """

    def __init__(self, seed: int, replica: int, device: torch.device) -> None:
        self._seed, self._replica = seed, replica
        self._generators = [torch.default_generator]
        if device.type == GPU:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's own
            self._generators.append(torch.cuda.default_generators[device.index or 0])

    def seeds(self, step: int, micro_batch: int, layers: Sequence[int]) -> list[int]:
        """Returns the seed of each of ``layers`` (indices in the model's list): 63 bits, made of these numbers only.

        One digest serves `_TOGETHER` layers: a pipeline needs thousands of seeds per second.
        """
        digests: dict[int, tuple[int, ...]] = {}
        for block in {layer // _TOGETHER for layer in layers}:
            place = pack("<6q", NOISE, self._seed, step, self._replica, micro_batch, block)
            digests[block] = unpack(f"<{_TOGETHER}Q", blake2b(place, digest_size=8 * _TOGETHER).digest())
        return [digests[layer // _TOGETHER][layer % _TOGETHER] >> 1 for layer in layers]

    def seed(self, seed: int) -> None:
        """Seeds the generators."""
        for generator in self._generators:
            generator.manual_seed(seed)
