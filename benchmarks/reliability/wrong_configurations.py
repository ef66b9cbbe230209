"""Runs wrong command lines as real commands: each is refused with exit code 2, in one screen that names the mistake.

`seconds` is processor time: other work on the machine does not count.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.common import Row, environment, parser, report

SCREEN = 24  # lines
LONGEST = 30  # seconds: a command that is still there has begun to train
CASES: Mapping[str, str] = {  # command line to what the answer must contain
    "train pipeline.K=0": "pipeline.K=0: should be greater than or equal to 1",
    "train pipeline.M=two": "pipeline.M=two",
    "train trainer.steps=1e300": "trainer.steps=",
    "train optimizer.lr=nan": "optimizer.lr=nan",
    "train optimizer.betas=[0.9,1]": "optimizer.betas=",
    "train trainer.average=7": "trainer.average=7",
    "train precision.loss_scale=1000": "precision.loss_scale=1000 is no power of two, and would round: use 1024",
    "train pipeline.schedule=sometimes": "pipeline.schedule=sometimes",
    "train pipeline.partition=[1,x]": "pipeline.partition=",
    "train launch.inline=maybe": "launch.inline=maybe",
    "train seed=-1": "seed=-1",
    "train pipeline.k=4": "there is no key pipeline.k; did you mean pipeline.K?",
    "train modle=transformer": "there is no key modle; did you mean model?",
    "train +trainer.foo=1": "trainer.foo",
    "train =3": "=3: write key=value",
    "train pipeline.partition=[1,2": "pipeline.partition",
    "train pipeline.K=1,2": "pipeline.K=1,2 is a sweep: give one value",
    "train --pipeline.K=4": "keys have no dashes, type pipeline.K=4",
    "train --config-name other": "other",
    "train optimizer=adm": "there is no optimizer=adm; did you mean optimizer=adam",
    "train hydra/launcher=slurm": "hydra",
    "train name='${nowhere}'": "name",
    "train pipeline.workers=5": "use pipeline.workers<=4 or pipeline.K>=5",
    "train pipeline.K=4 pipeline.partition=[3,5]": "pipeline.partition=[3,5] has 2 numbers but pipeline.K=4",
    "train pipeline.M=128": "use data.batch_size>=128 or pipeline.M<=96",
    "train trainer.steps=null": "set one, as trainer.steps=1000",
    "train checkpoint.init_from=a checkpoint.resume=b": "leave out one of them",
    "train task=classification": "task",
    "train data.pair=klingon": "klingon",
    "train data.batch_size=???": "data.batch_size needs a value: type data.batch_size=…",
    "train data=parallel_text data.root=nowhere": "data.root",
    "train hydra.run.dir=/dev/null/x": "hydra.run.dir",
    "train pipeline.threads=1000000": "pipeline.threads",
    "train pipeline.workers=100000 pipeline.K=100000": "pipeline.workers",
    "plan plan.device=h1000": "plan.device",
    "plan plan.fit=16GB plan.best=true": "plan.fit",
    "verify verify.dtype=half": "verify.dtype",
    "evaluate nowhere": "nowhere holds no complete checkpoint",
    "translate nowhere scores=perhaps": "scores",
    "export nowhere output=x.zip": "output=x.zip",
    "report --f": "--f",
    "bench table=9": "table=9",
    "train --config-dir . pipeline=broken": "pipeline/broken",
}
FILES = {  # in the current directory
    "pipeline/broken.yaml": b"K: [3\n",
}


def faults(case: str, code: object, text: str) -> list[str]:
    """Returns what is wrong with the answer to a case."""
    lines = len(text.splitlines())
    found = [f"does not name {CASES[case]!r}"] * (CASES[case] not in text)
    found += [f"exit code {code}"] * (code != 2) + ["traceback"] * ("Traceback" in text)
    return found + [f"{lines} lines"] * (lines > SCREEN)


def run(case: str, folder: Path) -> Row:
    """Runs a case as a real command in an empty folder."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    command, *words = shlex.split(case)
    before = os.times()
    done = subprocess.run(
        ["timeout", str(LONGEST), sys.executable, "-m", f"gpipe_cli.commands.{command}", *words],
        cwd=folder,
        env={**environment(), "GPIPE_CACHE": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    wrong = faults(case, done.returncode, done.stdout + done.stderr)
    return {"case": case, "seconds": seconds, "wrong": "; ".join(wrong)}


def main() -> None:
    arguments, wrong = parser(__doc__).parse_args(), []

    def rows() -> Iterator[Row]:
        for case in list(CASES)[:: 8 if arguments.quick else 1]:
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                row = run(case, Path(folder))
            wrong.extend([case] if row["wrong"] else [])
            yield row

    report({"case": "", "seconds": ".2f", "wrong": ""}, rows(), arguments.output)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
