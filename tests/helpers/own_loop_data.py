"""Defines the mini-batches of examples/own_loop.py as gpipe-train's source of data."""

from collections.abc import Iterator

from own_loop import STEPS, mini_batch

from gpipe_cli.data.source import Batch, Source


class Data(Source):
    """Gives the same mini-batches as the loop, in as many micro-batches."""

    def __init__(self, batch_size: int = 0) -> None:
        """Takes the key that gpipe-train always passes."""

    def train(self, position: int | None, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        for number in range(position or 0, STEPS):
            yield Batch(self._pieces(number, M), number + 1)

    def evaluation(self, M: int) -> Iterator[Batch]:
        yield Batch(self._pieces(STEPS, M), 0)

    def _pieces(self, number: int, M: int) -> list[tuple[tuple[object, ...], tuple[object, ...]]]:
        x, y = mini_batch(number)
        return [((x,), (y,)) for x, y in zip(x.tensor_split(M), y.tensor_split(M), strict=True)]
