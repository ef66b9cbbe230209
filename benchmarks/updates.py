"""Measures what is in the mini-batches of translation: is each a sample of the corpus, and what does it cost?

Columns: the standard deviation of target lengths in a mini-batch (mean) and in all; the fewest and most
sentences of a mini-batch; the share of padding; micro-batches, different shapes among them, and by how much the padded
tokens of a mini-batch's largest micro-batch exceed its mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.common import Row, parser, report
from gpipe_cli.data.cldr.source import TranslationSource
from gpipe_cli.data.source import no_report
from gpipe_cli.data.translation import PairSource


def measure(source: PairSource, M: int, batches: int) -> Row:
    """Returns the figures of the first mini-batches."""
    source.prepare(no_report)
    lengths, shapes, loads, tokens = [], Counter[tuple[int, ...]](), [], 0
    for batch in islice(source.train(None, M, 0, 1), batches):
        lengths.append(np.concatenate([(out != 0).sum(1).numpy() for _, (out,) in batch.micro_batches]))
        tokens += sum(int((ids != 0).sum() + (out != 0).sum()) for (ids, _), (out,) in batch.micro_batches)
        loads.append([ids.numel() + out.numel() for (ids, _), (out,) in batch.micro_batches])
        shapes.update((*ids.shape, out.shape[1]) for (ids, _), (out,) in batch.micro_batches)
    sentences = [len(of) for of in lengths]
    row: Row = {"spread": float(np.mean([of.std() for of in lengths])), "of all": float(np.concatenate(lengths).std())}
    row |= {"fewest": min(sentences), "most": max(sentences), "padding": 1 - tokens / sum(map(sum, loads))}
    row |= {"micro-batches": shapes.total(), "shapes": len(shapes)}
    return row | {"imbalance": float(np.mean([max(of) / np.mean(of) for of in loads]) - 1)}


def rows(quick: bool) -> Iterator[Row]:
    corpus: dict[str, Any] = {"vocabulary": 4_000}
    if quick:
        corpus = {"vocabulary": 500, "languages": ["de", "fr", "sw"], "largest": 300}
    batches = 64 if quick else 1_100
    for M in (1, 2, 4, 8):
        yield {"mini-batches": "96 pairs", "M": M, **measure(TranslationSource(96, **corpus), M, batches)}
    yield {"mini-batches": "4,000 tokens", "M": 4, **measure(TranslationSource(None, 4_000, **corpus), 4, 64)}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    columns = {"mini-batches": "s", "M": "d", "spread": ".2f", "of all": ".2f", "fewest": ",d", "most": ",d"}
    columns |= {"padding": ".1%", "micro-batches": ",d", "shapes": "d", "imbalance": ".1%"}
    report(columns, rows(arguments.quick), arguments.output)


if __name__ == "__main__":
    main()
