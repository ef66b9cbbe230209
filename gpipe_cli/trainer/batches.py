"""The mini-batches of a data source, each held to what was asked for: the other workers have room for no more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

from ..data.source import Batch, Source
from ..errors import ConfigurationError


def training_batches(source: Source, position: Any, M: int, replica: int, replicas: int) -> Iterator[Batch]:
    """`source.train`.

    Raises:
        ConfigurationError: while they are read: a mini-batch has another number of micro-batches.
    """
    return _held_to(M, source.train(position, M, replica, replicas), source, "train", may_be_fewer=False)


def first_batch(source: Source, M: int, replicas: int) -> Batch:
    """What replica 0 begins with.

    Raises:
        ConfigurationError: there is none, or it has another number of micro-batches.
    """
    batches = training_batches(source, None, M, 0, replicas)
    try:
        return next(batches)
    except StopIteration:
        raise ConfigurationError(
            f"the data source {_name(source)} gave no mini-batch: its train() must not end"
        ) from None
    finally:
        cast(Any, batches).close()


def evaluation_batches(source: Source, M: int, replica: int, replicas: int) -> Iterator[Batch]:
    """This replica's mini-batches of the evaluation set; the last ones may have fewer micro-batches.

    Raises:
        ConfigurationError: while they are read: a mini-batch has more micro-batches.
    """
    share = getattr(source, "evaluation_share", None)
    if share is not None:
        return _held_to(M, share(M, replica, replicas), source, "evaluation_share", may_be_fewer=True)
    batches = islice(source.evaluation(M), replica, None, replicas)
    return _held_to(M, batches, source, "evaluation", may_be_fewer=True)


def _held_to(asked: int, batches: Iterator[Batch], source: Source, method: str, may_be_fewer: bool) -> Iterator[Batch]:
    for batch in batches:
        given = len(batch.micro_batches)
        if given > asked or (given < asked and not may_be_fewer):
            raise ConfigurationError(
                f"the data source {_name(source)} gave {given} micro-batches in a mini-batch, {asked} were asked for: "
                f"the batches of its {method}() must have {'at most' if may_be_fewer else 'exactly'} M micro-batches"
            )
        yield batch


def _name(source: Source) -> str:
    return f"{type(source).__module__}.{type(source).__qualname__}"
