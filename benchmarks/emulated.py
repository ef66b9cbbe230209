"""Measures the step time on emulated accelerators against the limit of the schedule, beside torch's pipelining.

48 layers that sleep (backward twice the forward, 1/M of it per micro-batch) are cut into K equal cells on K real
processes that send real messages (torch.distributed.pipelining by gloo); for interleaved_1f1b into 2K, two on each
process; for zero_bubble each half of a backward takes as long as a forward. The limit is what
`gpipe_cli.schedule.simulate` returns for the very instruction lists that run, with free messages and free bookkeeping.
torch gets the same layers in the same processes, with torch.utils.checkpoint in its stages where remat is on; its ZBV
schedule, two stages on each process, stands beside our fastest kind.

A step lasts from one moment set for all workers to the end of the last one. The exchange that ends a trainer's step
lies outside, for the engine and torch alike. One untimed step without sleeping comes
first; after that the contenders take turns. step: median of the repetitions.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common import Row, parser, report
from gpipe_cli.benchmarks.tables.bench import parse
from gpipe_cli.benchmarks.tables.throughput import TORCH, ModelCosts, Setting, cells_of, measure

LAYERS = 48
SERIAL_SECONDS = {1: 1.5, 4: 3.0, 32: 8.0}  # of forward and backward by M: long enough that sleeps exceed 1 ms
QUICK_SERIAL_SECONDS = {1: 0.5, 4: 1.0, 32: 4.0}
COLUMNS = {"K": "d", "M": "d", "remat": "", "schedule": "", "limit, s": ".3f", "step, s": ".3f", "of limit": ".3f"}
COLUMNS |= {"torch, s": ".3f", "torch / ours": ".3f"}


def kinds_on(workers: int) -> list[str]:
    """Returns the kinds of schedule; one worker has nothing to interleave and no bubble to fill."""
    return ["gpipe", "1f1b", *(("interleaved_1f1b", "zero_bubble") if workers > 1 else ())]


def setting(K: int, M: int, remat: str, arguments: Namespace) -> Setting:
    """Returns the setting of `gpipe-bench` with equal layers."""
    serial = QUICK_SERIAL_SECONDS if arguments.quick else SERIAL_SECONDS
    costs = ModelCosts("transformer", (LAYERS,), [1.0] * LAYERS, [0] * LAYERS)
    words = ["table=2", f"remat={remat}", f"seconds={arguments.seconds or serial.get(M, 8.0)}"]
    return Setting(costs, K, M, parse(words), False)


def config(setting: Setting) -> dict[str, Any]:
    """Returns what the workers measure: all kinds, ours and torch's."""
    kinds = {kind: kind for kind in kinds_on(setting.K)}
    kinds |= {f"{TORCH}{kind}": kind for kind in (*kinds, *(["zbv"] if setting.K > 1 else []))}
    cut, K, remat = setting.costs.cut, setting.K, setting.options.remat
    return {**setting.config(), "contenders": {n: (kind, cut(cells_of(kind, K)), remat) for n, kind in kinds.items()}}


def rows(arguments: Namespace) -> Iterator[Row]:
    """Measures with one set of processes for each K; makes one row per kind of schedule."""
    for K in arguments.K:
        cases = [(M, remat) for M in arguments.M for remat in ("never", "except_last")]
        settings = [setting(K, M, remat, arguments) for M, remat in cases]
        repetitions = 1 if arguments.quick else arguments.repetitions
        answers = measure([*map(config, settings)], K, repetitions, arguments.realtime)
        for (M, remat), one, seconds in zip(cases, settings, answers, strict=True):
            place = {"K": K, "M": M, "remat": remat}
            for kind in kinds_on(K):
                least, step, peer = one.limit(kind), seconds[kind], seconds.get(f"torch {kind}")
                row: Row = {**place, "schedule": kind, "limit, s": least, "step, s": step, "of limit": least / step}
                yield row | {"torch, s": peer, "torch / ours": None if peer is None else peer / step}
            if zbv := seconds.get("torch zbv"):
                best = min(kinds_on(K), key=seconds.__getitem__)
                row = {**place, "schedule": f"zbv, beside {best}", "limit, s": None, "step, s": seconds[best]}
                yield row | {"of limit": None, "torch, s": zbv, "torch / ours": zbv / seconds[best]}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--K", type=int, nargs="+", default=[1, 2, 4, 8], help="divisors of 24 (default: 1 2 4 8)")
    options.add_argument("--M", type=int, nargs="+", default=[1, 4, 32], help="default: 1 4 32")
    options.add_argument("--repetitions", type=int, default=3, help="timed steps of each contender (default: 3)")
    options.add_argument("--seconds", type=float, help="serial work per step; default: 1.5, 3, 8 s for M = 1, 4, 32")
    options.add_argument("--realtime", action="store_true", help="go before the machine's other work (Linux, as root)")
    arguments = options.parse_args()
    report(COLUMNS, rows(arguments), arguments.output, notes)


def notes(rows: Sequence[Row]) -> list[str]:
    worst = min((row for row in rows if row["of limit"]), key=lambda row: row["of limit"])
    beside = [row["torch / ours"] for row in rows if row["torch / ours"] is not None]
    place = f"K={worst['K']} M={worst['M']} remat={worst['remat']} {worst['schedule']}"
    return [
        f"lowest share of the limit: {worst['of limit']:.3f} at {place}",
        f"faster than torch.distributed.pipelining in {sum(q >= 1 for q in beside)} of {len(beside)} rows",
    ]


if __name__ == "__main__":
    main()
