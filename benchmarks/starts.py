"""Measures the processor seconds of a job's start: the first with a new profile of its layers, and the second.

Of the command and all its workers, with one step and a small evaluation. `importing` is that of Python, torch and the
package, which workers share; `profiling` is what the first start takes more than the second.

    python -m benchmarks.starts
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.common import Row, parser, report
from gpipe_cli.benchmarks.tables.workers import environment, run_command

SHORT = "trainer.steps=1 trainer.evaluate_first=false checkpoint.every=null"
JOBS = {
    "model=transformer pipeline.K=16": "task.generation=null data.evaluation_per_language=1",
    "model=module model.module._target_=torchvision.models.resnet18 model.module.num_classes=10": "",
}
WORKERS = 2
COLUMNS = {"job": "", "first, s": ".1f", "second, s": ".1f", "importing": ".1f", "profiling": ".1f"}
COLUMNS |= {"second, a worker": ".1f"}


def processor_seconds(run: Callable[[], object]) -> float:
    """Returns the processor seconds of the processes that a function runs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(jobs: Sequence[str], folder: Path) -> Iterator[Row]:
    """Yields a row for each job."""
    importing = [sys.executable, "-c", "import gpipe_cli.trainer.run"]
    shared = processor_seconds(partial(subprocess.run, importing, env=environment(), check=True))
    for number, job in enumerate(jobs):
        start = f"{job} {JOBS[job]} {SHORT} pipeline.workers={WORKERS} hydra.run.dir={folder}/{number}_"
        _started(f"{start}data pipeline.cost=flops")  # which prepares them
        first, second = _started(f"{start}first"), _started(f"{start}second")
        row = {"job": job, "first, s": first, "second, s": second, "importing": shared}
        yield {**row, "profiling": first - second, "second, a worker": second / WORKERS}


def _started(words: str) -> float:
    return processor_seconds(partial(run_command, "gpipe-train", words.split()))


def main() -> None:
    arguments = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(OMP_NUM_THREADS="1", GPIPE_CACHE=folder)
        report(COLUMNS, measured([*JOBS][: 1 if arguments.quick else None], Path(folder)), arguments.output)


if __name__ == "__main__":
    main()
