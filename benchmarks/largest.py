"""Finds the largest Transformer that trains in a small memory: as one cell, recomputed, and with `pipeline.offload`.

T(L,2048,8) of width 512 on the default sentences takes two steps of Adam in one process, in a memory cgroup of --memory
GB, so that nothing larger can run. For one cell, L is the largest that does. Cells that come and go have --layers, each
in a cell of its own. Seconds are those of the second step, beside the same words without a limit and without offload;
peak is the memory that the process held, pages of files and of torch's libraries among it.

    python -m benchmarks.largest --folder /fast/disk
"""

import json
import os
import signal
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import Row, parser, report
from gpipe_cli.benchmarks.tables.workers import environment

MOST = 40  # layers of one cell that are tried at most
MODEL = "model=transformer model.H=2048 model.A=8 model.d_model=512 trainer.average=null optimizer=adam"
RUN = "trainer.steps=2 trainer.evaluate_every=null trainer.evaluate_first=false task.generation=null logging.every=1"
QUIET = "checkpoint.every=null logging.tensorboard=false launch.inline=true pipeline.workers=1 pipeline.cost=parameters"
GROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))  # versions 1 and 2
COLUMNS = {"how": "", "L": "d", "parameters": ",d", "state, GB": ".2f", "peak, GB": ".2f", "step, s": ".1f"}
COLUMNS |= {"without a limit, s": ".1f", "times as long": ".2f"}


@contextmanager
def memory_group(size: int) -> Iterator[list[str]]:
    """Makes a memory cgroup of so many bytes; yields the words before a command that run it there.

    Raises:
        PermissionError: this process may not make one.
    """
    for folder, limit in GROUPS:
        group = Path(folder, f"gpipe-{os.getpid()}")
        try:
            group.mkdir()
            (group / limit).write_text(str(size))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        try:
            yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        finally:
            group.rmdir()
        return
    raise PermissionError("this process may not make a memory cgroup")


def train(L: int, words: Sequence[str], size: int | None) -> Row | None:
    """Returns what two steps of T(L,2048,8) took; None where they were refused or killed.

    Args:
        words: further words of gpipe-train.
        size: bytes of the memory cgroup; None: no limit.
    """
    group: AbstractContextManager[list[str]] = memory_group(size) if size else nullcontext([])
    with group as prefix, TemporaryDirectory() as folder:
        typed = [*f"{MODEL} {RUN} {QUIET} model.L={L} hydra.run.dir={folder}/run".split(), *words]
        command = [*prefix, sys.executable, "-m", "gpipe_cli.commands.train", *typed]
        ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        if ended.returncode:
            killed = ended.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
            cause = "killed" if killed else ended.stderr.strip().splitlines()[-1]
            print(f"L={L} {' '.join(words)}: {cause}", file=sys.stderr)
            return None
        *_, step = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    row = {"L": L, "parameters": summary["parameters"], "state, GB": 16 * summary["parameters"] / 1e9}
    return row | {"peak, GB": summary["peak_memory_bytes"] / 1e9, "step, s": step["seconds"]}


def row(how: str, L: int, words: Sequence[str], size: int, more: Sequence[str] = ()) -> Row:
    """Returns the row of one way, in so many bytes beside without a limit; ``more``: words for the former alone."""
    small, free = train(L, [*words, *more], size), train(L, words, None)
    if small is None or free is None:
        return {"how": how, "L": L}
    seconds = free["step, s"]
    return {"how": how, **small, "without a limit, s": seconds, "times as long": small["step, s"] / seconds}


def measured(size: int, folder: Path, layers: int, batch: Sequence[str]) -> Iterator[Row]:
    """Yields a row for each way.

    Args:
        size: bytes of the memory cgroup.
        folder: folder of the file that holds the state of cells that come and go.
        layers: L with such cells.
        batch: words of gpipe-train that size the mini-batch.
    """
    for how, remat in {"one cell": "never", "one cell, recomputed": "always"}.items():
        words = ["pipeline.K=1", f"pipeline.remat={remat}", *batch]
        most = bisect_left(range(2, MOST + 1), True, key=lambda L: train(L, words, size) is None) + 1
        yield row(how, most, words, size)
    words = [f"pipeline.K={layers}", "pipeline.remat=always", *batch]
    offload = ["pipeline.offload=true", f"pipeline.offload_dir={folder}"]
    yield row(f"{layers} cells, offload", layers, words, size, offload)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--memory", type=float, default=2.0, help="GB of the cgroup (default: 2)")
    options.add_argument("--folder", type=Path, default=Path.cwd(), help="where the state lies that is not in memory")
    options.add_argument("--layers", type=int, default=110, help="L with offload (default: 110)")
    options.add_argument("--examples", type=int, default=16, help="of a mini-batch (default: 16)")
    given = options.parse_args()
    try:
        with memory_group(1 << 30):
            pass
    except PermissionError as error:
        sys.exit(f"skipped: {error}")
    batch = ["data.batch_tokens=null", f"data.batch_size={given.examples}", "pipeline.M=4"]
    layers, memory = (2, 1.0) if given.quick else (given.layers, given.memory)
    report(COLUMNS, measured(round(1e9 * memory), given.folder, layers, batch), given.output)


if __name__ == "__main__":
    main()
