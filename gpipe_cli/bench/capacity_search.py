"""The rows of table 1 that are measured: the largest models that really train a step. No torch; the workers have it.

Each trial has processes of its own: one that finds no room ends its workers, which may wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpipe_cli.launch.report import WorkerOutOfMemory
from gpipe_cli.planner.devices import parse_bytes

from .options import BenchOptions
from .tables import Say
from .workers import run_workers

WORKER, MEMORY = "gpipe_cli.bench.capacity:worker", "gpipe_cli.bench.capacity:device_memory"
PRELOAD = ("gpipe_cli.bench.capacity",)
DEVICE = "device"  # in place of a number of bytes
GB = 1e9
MEASURED_M = 8
LARGEST_L = 512  # that is tried; at width 128 one of them takes three minutes on a core
ROWS = ((1, True), (1, False), (2, False))  # (K, naive)
NARROW, WIDE, WIDE_FROM = 128, 1024, GB  # d_model, and the budget from which on it is the wider one
SHORT, LONG = 64, 1024  # tokens of a text; the paper's where a GPU's own memory is filled


def read_memory(words: Sequence[str]) -> list[int | None]:
    """Budgets in bytes; None stands for what the present device holds.

    Raises:
        ConfigurationError: no size, and not that word.
    """
    return [None if word == DEVICE else parse_bytes(word, "memory") for word in words]


def measure(typed: int | None, options: BenchOptions, say: Say) -> list[dict[str, Any]]:
    """One row for each of `ROWS`: what was tried, and what was found.

    Args:
        typed: budget of a worker; None: what the present device holds.
    """
    texts = options.batch or 32
    budget, tokens = (typed, SHORT) if typed is not None else device_budget()
    model = {"width": NARROW if budget < WIDE_FROM else WIDE, "tokens": tokens, "texts": texts}
    rows = []
    for K, naive in ROWS:
        M, remat = (1, "never") if naive else (min(MEASURED_M, texts), "always")
        say(f"real steps on this machine, {budget / GB:.3g} GB a worker, K={K}, {'naive' if naive else 'pipeline'}")
        trial = {**model, "M": M, "remat": remat, "budget": budget}
        rows.append({"K": K, "naive": naive, **trial, "found": search(K, trial, say)})
    return rows


def device_budget() -> tuple[int, int]:
    """What the present device holds for a worker, in bytes, and the tokens of the texts to fill it with."""
    found = run_workers(MEMORY, 1, {"workers": max(K for K, _ in ROWS)}, PRELOAD)
    return found["budget"], LONG if found["kind"] == "cuda" else SHORT


def search(K: int, trial: dict[str, Any], say: Say, most: int = LARGEST_L) -> dict[str, Any] | None:
    """``L``, ``peak`` and ``parameters`` of the largest that fits; None where not even L=1 does.

    ``or_more``: larger ones were not tried, and may fit too; ``trials``: how many were.
    """
    found: dict[int, dict[str, int]] = {}
    tried: list[int] = []

    def peak_of(L: int) -> int | None:
        tried.append(L)
        try:
            found[L] = run_workers(WORKER, K, {**trial, "L": L}, PRELOAD)
        except WorkerOutOfMemory:
            say(f"  L={L}: does not fit")
            return None
        say(f"  L={L}: {found[L]['peak'] / GB:.3f} GB")
        return found[L]["peak"]

    L = largest(peak_of, trial["budget"], most)
    return {"L": L, **found[L], "or_more": most == L, "trials": len(tried)} if L else None


def largest(peak_of: Callable[[int], int | None], budget: int, most: int) -> int:
    """The largest number from 1 to ``most`` that fits; 0 where 1 does not.

    Args:
        peak_of: tries a number: the bytes that it took, None where they were more than the budget. What fits with a
            number fits with a smaller one; asked once of any.
        budget: bytes.
    """
    peaks: list[tuple[int, int]] = []
    low, high, failures = 0, most + 1, 0
    while high - low > 1:
        guess = _guess(peaks, budget, low, high)
        if failures:  # the line promised too much: back from what failed, farther each time
            guess = min(guess, high - 2 ** (failures - 1))
        guess = max(low + 1, min(guess, high - 1))
        peak = peak_of(guess)
        if peak is None:
            high, failures = guess, failures + 1
        else:
            low, failures = guess, 0
            peaks.append((guess, peak))
    return low


def _guess(peaks: list[tuple[int, int]], budget: int, low: int, high: int) -> int:
    """Where the line through the first and the last trial meets the budget; by doubling and halving, where none does.

    After one trial the line through nothing, which takes nothing: rather too small a guess than too large a one.
    """
    blind = min(2 * low, (low + high) // 2)
    if not peaks:
        return blind
    (a, peak_a), (b, peak_b) = peaks[0] if len(peaks) > 1 else (0, 0), peaks[-1]
    slope = (peak_b - peak_a) / (b - a)
    return int(b + (budget - peak_b) / slope) if slope > 0 else blind
