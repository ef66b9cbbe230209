"""Measures the processor seconds of a job's start: the first with a new profile of its layers, and the second.

Of the command and all its workers, with one step and a small evaluation. `importing` is that of Python, torch and the
package, which workers share; `profiling` is what the first start takes more than the second.

    python -m benchmarks.starts
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks.common import Row, children_seconds, parser, report
from gpipe_cli.benchmarks.tables.workers import environment

WORKERS = 2
SHORT = f"trainer.steps=1 trainer.evaluate_first=false checkpoint.every=null pipeline.workers={WORKERS}"
JOBS = {
    "model=transformer pipeline.K=16": "task.generation=null data.evaluation_per_language=1",
    "model=module model.module._target_=torchvision.models.resnet18 model.module.num_classes=10": "",
}
COLUMNS = {"job": "", **dict.fromkeys(("first, s", "second, s", "importing", "profiling", "second, a worker"), ".1f")}


def processor_seconds(command: str) -> float:
    """Returns the processor seconds of a command of Python and its children."""
    before = children_seconds()
    subprocess.run([sys.executable, *command.split()], env=environment(), capture_output=True, check=True)
    return children_seconds() - before


def measured(jobs: Sequence[str], folder: str) -> Iterator[Row]:
    """Yields a row for each job."""
    importing = processor_seconds("-m gpipe_cli.trainer.run")  # which is no command, and ends
    for number, job in enumerate(jobs):
        start = f"-m gpipe_cli.commands.train {job} {JOBS[job]} {SHORT} hydra.run.dir={folder}/{number}_"
        processor_seconds(f"{start}data pipeline.cost=flops")  # prepares them
        first, second = processor_seconds(f"{start}first"), processor_seconds(f"{start}second")
        row = {"job": job, "first, s": first, "second, s": second, "importing": importing}
        yield {**row, "profiling": first - second, "second, a worker": second / WORKERS}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(OMP_NUM_THREADS="1", GPIPE_CACHE=folder)
        report(COLUMNS, measured([*JOBS][: 1 if arguments.quick else None], folder), arguments.output)


if __name__ == "__main__":
    main()
