"""Seeds every random number of a run by its purpose.

What a `_target_` makes comes from (seed, section), initial weights from (seed, layer), dropout and drop path from
(seed, step, replica, micro-batch, layer); the backward and evaluations have seeds of their own. So random
numbers do not depend on K, on the worker or on earlier ones, and recompute (paper, section 2.3) draws the same numbers
again without any stored generator state. What the program around the engine draws goes on as if the engine drew none.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from struct import pack, unpack

import torch
from torch import Tensor

from .. import cpu
from ..gpus import GPU

WEIGHTS, NOISE, SECTION, EVALUATION, COSTS = 1, 2, 3, 4, 6  # purposes of a seed, so that no two coincide
BACKWARD = 0x5DEECE66D  # changes the bits of a layer's seed for its backward
_TOGETHER = 8  # seeds of eight bytes in the longest digest of blake2b


def derive_seed(*numbers: int) -> int:
    """Returns a 63-bit seed made of 64-bit integers; any change of any of them gives an unrelated seed."""
    digest = blake2b(pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeded(*numbers: int) -> AbstractContextManager[None]:
    """Returns the context in which the default generators of the CPU are seeded by these numbers (`cpu.seeded`)."""
    return cpu.seeded(derive_seed(*numbers))


class NoiseSource:
    """Seeds the generators that a layer may draw from, before it runs.

    Args:
        seed: the run's seed.
        replica: 0 … D−1.
        device: device on which the layers run. They use its default generator, or the CPU's, as a layer does that calls
            ``torch.rand(())``.
    """

    def __init__(self, seed: int, replica: int, device: torch.device) -> None:
        self._seed, self._replica = seed, replica
        self._generators = [torch.default_generator]
        if device.type == GPU:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's own
            self._generators.append(torch.cuda.default_generators[device.index or 0])

    def seeds(self, step: int, micro_batch: int, layers: Sequence[int]) -> list[int]:
        """Returns the seed of each of ``layers`` (indices in the model's list) for a micro-batch of a training step."""
        return self._seeds(layers, NOISE, self._seed, step, self._replica, micro_batch)

    def evaluation_seeds(self, number: Sequence[int], micro_batch: int, layers: Sequence[int]) -> list[int]:
        """Returns the seed of each of ``layers`` for a micro-batch of a forward without backward.

        Args:
            number: numbers of the forward (`Engine.run_forward`).
        """
        return self._seeds(layers, EVALUATION, self._seed, *number, self._replica, micro_batch)

    def _seeds(self, layers: Sequence[int], *place: int) -> list[int]:
        """Returns a seed of 63 bits for each of ``layers``, made of its index and the numbers ``place`` only.

        One digest serves `_TOGETHER` layers, because a pipeline needs thousands of seeds per second.
        """
        digests: dict[int, tuple[int, ...]] = {}
        for block in {layer // _TOGETHER for layer in layers}:
            numbers = pack(f"<{len(place) + 1}q", *place, block)
            digests[block] = unpack(f"<{_TOGETHER}Q", blake2b(numbers, digest_size=8 * _TOGETHER).digest())
        return [digests[layer // _TOGETHER][layer % _TOGETHER] >> 1 for layer in layers]

    def seed(self, seed: int) -> None:
        """Seeds the generators."""
        for generator in self._generators:
            generator.manual_seed(seed)

    def seed_backward(self, seed: int, outputs: Iterable[Tensor | None], given: Sequence[Tensor] = ()) -> None:
        """Makes the layer's backward seed the generators, when it begins, by a seed made of ``seed``.

        Args:
            outputs: the layer's outputs and its auxiliary loss (None: no loss). The backward begins when the first
                gradient arrives at one of those that the layer itself has made.
            given: the layer's inputs. It has not made those that are also among its outputs.
        """
        left = [seed ^ BACKWARD]  # empty once the generators are seeded

        def begin(gradients: object) -> None:
            if left:
                self.seed(left.pop())

        for tensor in outputs:
            if tensor is not None and tensor.grad_fn is not None and not any(tensor is one for one in given):
                tensor.grad_fn.register_prehook(begin)

    def states(self) -> list[Tensor]:
        """Returns the states of the generators."""
        return [generator.get_state() for generator in self._generators]

    def moment(self) -> bytes:
        """Returns the generators' states as bytes, which change with every number that is drawn."""
        return b"".join(state.numpy().tobytes() for state in self.states())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts the generators back, at the end of the context, into the states that they had before it."""
        states = self.states()
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
