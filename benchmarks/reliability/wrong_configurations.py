"""Runs hundreds of wrong command lines and checks how they are refused: exit code 2, one screen, every mistake named.

Each case is a real command in a directory of its own. `refused` counts those that end with exit code 2 and without a
traceback, in at most 24 lines, and name every mistake. `slowest, s` is processor time: other work on the machine does
not count. Cases of one mistake are listed below or made of keys and wrong values; those of several are drawn from them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import Row, environment, parser, report

CASES, SEED = 300, 1
SCREEN = 24  # lines
LONGEST = 30  # seconds: a command that is still there has begun to train
COUNTS = ("0", "-1", "2.5", "two", "true", "nan", "inf", "[3]", "1e300", "{a:1}")
AMOUNTS = ("0", "-1", "abc", "nan", "inf", "[]", "true")
SHARES = ("1", "-0.1", "7", "nan", "abc")
SWITCHES = ("3", "maybe", "null", "[true]")
WORDS = ("sometimes", "0", "[a]", "null")
WRONG_VALUES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("pipeline.K", "pipeline.M", "pipeline.replicas", "pipeline.threads", "pipeline.workers"), COUNTS),
    **dict.fromkeys(("trainer.steps", "trainer.evaluate_every", "trainer.nonfinite_limit"), COUNTS),
    **dict.fromkeys(("checkpoint.every", "checkpoint.keep", "logging.every", "trainer.patience"), COUNTS),
    **dict.fromkeys(("data.batch_size", "data.largest", "data.max_length", "model.L", "model.H", "model.A"), COUNTS),
    **dict.fromkeys(("model.d_model", "data.vocabulary", "lr_schedule.warmup_steps"), COUNTS),
    **dict.fromkeys(("task.generation.beam", "task.generation.group"), COUNTS),
    **dict.fromkeys(("trainer.epochs", "trainer.seconds", "trainer.gradient_clip", "task.logit_clip"), AMOUNTS),
    **dict.fromkeys(("launch.grace_seconds", "launch.stall_seconds"), AMOUNTS),
    **dict.fromkeys(("optimizer.lr", "optimizer.eps", "optimizer.weight_decay"), AMOUNTS[1:]),
    **dict.fromkeys(("model.dropout", "model.attention_dropout", "task.label_smoothing"), SHARES),
    "trainer.average": (*SHARES, "0"),
    "optimizer.betas": ("[0.9]", "0.9", "[0.9,1]", "[0.9,0.9,0.9]", "[a,b]", "null"),
    **dict.fromkeys(("trainer.evaluate_first", "logging.tensorboard", "launch.inline"), SWITCHES),
    **dict.fromkeys(("pipeline.sync_batchnorm", "model.depth_scaled_init", "checkpoint.init_average"), SWITCHES),
    **dict.fromkeys(("pipeline.compile", "pipeline.shard_optimizer", "precision.tf32"), SWITCHES),
    **dict.fromkeys(("pipeline.remat", "pipeline.schedule", "pipeline.cost", "pipeline.device"), WORDS),
    **dict.fromkeys(("pipeline.backend", "logging.console", "data.evaluation_split"), WORDS),
    "model.depth_scale_layers": WORDS,
    "pipeline.partition": ("[]", "[0]", "7", "largest", "null", "[1,x]"),
    "precision.autocast": ("float8", "16", "[bfloat16]"),
    "precision.boundaries": ("float8", "bf16", "true"),
    "precision.loss_scale": ("0", "-2", "1000", "large"),
    "seed": ("-1", "1.5", "one", "9223372036854775808", "null"),
    "data.languages": ("fr", "[]", "7", "{de:1}"),
    "data.temperature": ("0.5", "nan", "hot"),
    "checkpoint.allow_changes": ("true", "pipeline.K", "{a:1}"),
    "name": ("5", "[a]", "true"),
}
UNKNOWN_KEYS = (
    *(
        "pipeline.k=4",
        "pipeline.micro_batches=4",
        "trainer.step=3",
        "trainer.max_steps=3",
        "model.layers=3",
        "modle.L=3",
    ),
    *("optimizer.learning_rate=1", "optimizer.beta=1", "data.batchsize=3", "task.smoothing=0", "lr_schedule.warm_up=3"),
    *("checkpoint.resme=auto", "logging.level=3", "launch.timeout=3", "precision.dtype=bf16", "batch_size=3", "lr=0.1"),
    *("+pipeline.chunks=4", "+trainer.foo=1", "+model.foo=1", "+data.foo=1", "+task.foo=1", "+foo=1", "~trainer.foo"),
)


@dataclass(frozen=True)
class Case:
    """Describes one wrong command line.

    Attributes:
        kind: of mistake.
        words: of the command line.
        names: texts that the answer must contain, one for each mistake.
        command: the module of gpipe_cli.commands.
        files: that lie in the current directory, by path.
        shell: how bash starts the command, `"$@"`.
    """

    kind: str
    words: tuple[str, ...]
    names: tuple[str, ...]
    command: str = "train"
    files: Mapping[str, bytes] = field(default_factory=dict)
    shell: str = '"$@"'


@dataclass(frozen=True)
class Answer:
    """Holds what a command said: exit code, output of both kinds, seconds of processor and of wall-clock time."""

    code: int
    text: str
    processor: float
    wall: float

    def faults(self, case: Case) -> list[str]:
        """Returns what is wrong with the answer to a case."""
        lines = self.text.splitlines()
        found = [f"does not name {name!r}" for name in case.names if name not in self.text]
        found += [f"exit code {self.code}"] * (self.code != 2) + ["traceback"] * ("Traceback" in self.text)
        return found + [f"{len(lines)} lines"] * (len(lines) > SCREEN)


# -- cases -------------------------------------------------------------------------------------------------------------


def values() -> list[Case]:
    """Returns every key with each of its wrong values."""
    return [Case("value", (f"{key}={value}",), (f"{key}=",)) for key, wrong in WRONG_VALUES.items() for value in wrong]


def unknown_keys() -> list[Case]:
    """Returns keys that do not exist."""
    return [Case("unknown key", (word,), (word.lstrip("+~").partition("=")[0],)) for word in UNKNOWN_KEYS]


def words_and_options() -> list[Case]:
    """Returns words that cannot be read, and wrong options."""
    wrong = (
        "=3",
        "pipeline.K",
        "pipeline.partition=[1,2",
        "name='a",
        "a b=3",
        "name=${foo",
        "pipeline.K==",
        "{",
        "a=b=c}",
    )
    read = [Case("word", (word,), (word.split("=")[0] or "=3",)) for word in wrong]
    read += [Case("word", (word,), (word,)) for word in ("pipeline.K=1,2", "optimizer=adam,sgd", "seed=range(3)")]
    read += [Case("word", (word,), (word,)) for word in ("optimizer=[adam,sgd]", "model=[transformer]", "data=[]")]
    options = (["--foo"], ["--pipeline.K=4"], ["--config-dir"], ["--config-dir", "nowhere"], ["--cfg", "jobs"])
    more = (["--config-name"], ["--config-name", "other"], ["-x"], ["--info", "everything"], ["--resolve"])
    return read + [Case("option", tuple(words), (words[-1].lstrip("-"),)) for words in (*options, *more)]


def groups() -> list[Case]:
    """Returns groups and options that do not exist, and interpolations that lead nowhere."""
    wrong = ("model=null", "pipeline=3", "optimizer=adm", "data=[a,b]", "task=5", "precision=fp8", "experiment=nmt")
    found = [Case("group", (word,), (word.partition("=")[0],)) for word in wrong]
    nowhere = ("foo/bar=baz", "modle=transformer", "+model=transformer", "hydra/launcher=slurm", "~optimizer")
    found += [Case("group", (word,), (word.strip("+~").partition("=")[0].split("/")[0],)) for word in nowhere]
    texts = ("${nowhere}", "${pipeline.Q}", "${foo:bar}", "${oc.env:NOT_SET_AT_ALL}", "${name}")
    found += [Case("interpolation", (f"name='{text}'",), ("name",)) for text in texts]
    hydra = ("hydra.foo=3", "hydra.mode=FAST", "hydra.run.foo=1", "hydra.job.chdir=maybe", "hydra.run.dir=${nowhere}")
    return found + [Case("hydra key", (word,), ("hydra",)) for word in hydra]


def relations() -> list[Case]:
    """Returns keys that are right alone and wrong together, and sizes that the machine does not have."""
    pairs: dict[tuple[str, ...], tuple[str, ...]] = {
        ("pipeline.workers=5",): ("pipeline.workers",),
        ("pipeline.K=4", "pipeline.partition=[3,5]"): ("pipeline.partition", "pipeline.K"),
        ("pipeline.schedule=interleaved_1f1b", "pipeline.K=4", "pipeline.workers=3"): ("pipeline.workers",),
        ("pipeline.M=128",): ("pipeline.M", "data.batch_size"),
        ("trainer.steps=null",): ("trainer.steps",),
        ("trainer.trace_steps=[5]", "trainer.steps=3"): ("trainer.trace_steps",),
        ("trainer.patience=3", "trainer.evaluate_every=null"): ("trainer.patience",),
        ("pipeline.backend=nccl", "pipeline.device=cpu"): ("pipeline.backend",),
        ("launch.inline=true", "pipeline.workers=2"): ("launch.inline",),
        ("checkpoint.init_from=a", "checkpoint.resume=b"): ("checkpoint.init_from",),
        ("task=classification",): ("task",),
        ("data=digits",): ("data",),
        ("model=transformer_lm_small", "data=cldr"): ("model",),
        ("model.source_vocabulary=100",): ("model.source_vocabulary", "data.vocabulary"),
        ("model=amoebanet", "model.classes=3"): ("model.classes",),
        ("data.smallest=500", "data.largest=100"): ("data.smallest",),
        ("data.pair=de", "data.languages=[fr,de]"): ("data.pair",),
        ("data.languages=[xx]",): ("xx",),
        ("data.pair=klingon",): ("klingon",),
        ("data.batch_size=null",): ("data.batch_size",),
        ("optimizer=sgd", "optimizer.nesterov=true", "optimizer.momentum=0"): ("optimizer.nesterov",),
        ("optimizer.decay_only=matrices", "~optimizer.weight_decay"): ("optimizer.decay_only",),
        ("lr_schedule=cosine", "trainer.steps=null", "trainer.epochs=1"): ("cosine",),
        ("data=parallel_text",): ("data.root",),
        ("data=parallel_text", "data.root=nowhere"): ("data.root",),
        ("model=amoebanet", "data=image_folder"): ("data.classes",),
        ("model=amoebanet", "model.L=4"): ("model.L",),
        ("task.generation.length_ratio=0", "task.generation.length_extra=0"): ("task.generation.length_ratio",),
        ("hydra.run.dir=/proc/1/x",): ("hydra.run.dir",),
        ("hydra.run.dir=/dev/null/x",): ("hydra.run.dir",),
        ("-m", "hydra.sweep.dir=/dev/null/x", "pipeline.K=1,2"): ("hydra.sweep.dir",),
    }
    sizes = ("pipeline.threads=1000000", "pipeline.K=100000", "model.H=1e12", "model.L=1e5", "pipeline.replicas=1e6")
    found = [Case("relation", words, names) for words, names in pairs.items()]
    found += [Case("size", (word, "data.batch_size=1e6"), (word.partition("=")[0],)) for word in sizes]
    found += [
        Case("size", (word,), (word.partition("=")[0],)) for word in ("data.batch_size=1e12", "model.d_model=1e9")
    ]
    return [*found, Case("size", ("pipeline.workers=100000", "pipeline.K=100000"), ("pipeline.workers",))]


def files() -> list[Case]:
    """Returns YAML files that cannot be used."""
    contents = {
        "utf16": "K: 3  # Zellen für alle\n".encode("utf-16"),
        "latin1": "K: 3  # Zellen für alle\n".encode("latin-1"),
        "broken": b"K: [3\n",
        "tab": b"K:\t- 3\n\tM: 4\n",
        "list": b"- K: 3\n- M: 4\n",
        "text": b"K=3\n",
        "circle": b"defaults: [circle]\nK: 3\n",
        "missing": b"defaults: [nowhere]\nK: 3\n",
        "key": b"defaults: [default]\nmicro_batches: 8\n",
        "value": b"defaults: [default]\nK: none\n",
    }
    named = {"key": "pipeline.micro_batches", "value": "pipeline.K=none", "missing": "nowhere"}
    return [
        Case(
            "file",
            ("--config-dir", "my", f"pipeline={name}"),
            (named.get(name, f"pipeline/{name}"),),
            files={f"my/pipeline/{name}.yaml": content},
        )
        for name, content in contents.items()
    ]


def other_commands() -> list[Case]:
    """Returns wrong calls of the other commands, and commands in surroundings that do not suit them."""
    run = "nowhere holds no complete checkpoint"
    found = [
        Case("plan", ("pipeline.K=0", "plan.memory=x"), ("pipeline.K=0", "plan.memory=x"), "plan"),
        Case("plan", ("plan.device=h1000", "plan.foo=3"), ("plan.device", "plan.foo"), "plan"),
        Case("plan", ("plan.best=3", "--foo", "seed=x"), ("plan.best", "--foo", "seed"), "plan"),
        Case("plan", ("plan.fit=16GB", "plan.best=true"), ("plan.fit",), "plan"),
        Case("plan", ("plan.picture=a.gif", "plan.efficiency=0"), ("plan.picture", "plan.efficiency"), "plan"),
        Case("plan", ("-m", "pipeline.K=1,0", "plan.format=xml"), ("pipeline.K=0", "plan.format"), "plan"),
        Case("plan", ("plan=3",), ("plan",), "plan"),
        Case("verify", ("verify.steps=0", "pipeline.kk=3"), ("verify.steps", "pipeline.kk"), "verify"),
        Case("verify", ("verify.dtype=half", "verify.x=1", "seed=-1"), ("verify.dtype", "verify.x", "seed"), "verify"),
        Case("eval", ("nowhere", "split=x", "pipeline.kk=3"), (run, "split=x", "pipeline.kk"), "evaluate"),
        Case("eval", ("split=dev",), ("checkpoint=",), "evaluate"),
        Case("eval", ("compare=[]", "foo=3"), ("compare", "foo"), "evaluate"),
        Case("eval", ("compare=[nowhere]",), ("nowhere",), "evaluate"),
        Case("translate", ("nowhere", "scores=perhaps", "input=none"), (run, "scores", "input=none"), "translate"),
        Case("translate", ("nowhere", "--fast", "references=no"), (run, "--fast", "references"), "translate"),
        Case("export", ("nowhere", "output=x.zip", "average=4"), (run, "output=x.zip", "average=4"), "export"),
        Case("export", ("nowhere", "foo=1", "overwrite=no"), (run, "foo", "overwrite"), "export"),
        Case("report", ("a=3", "--f"), ("no key a", "--f"), "report"),
        Case("bench", ("table=9", "foo=3", "K=0"), ("table=9", "foo", "K="), "bench"),
        Case("bench", ("quick=perhaps",), ("quick", "which table"), "bench"),
    ]
    gone = 'mkdir gone && cd gone && rmdir ../gone && "$@"'
    found += [Case("no directory", (), ("directory",), command, shell=gone) for command in ("train", "plan")]
    closed = ('"$@" >&-', '"$@" 2>&1 >&-', '"$@" <&-', '"$@" >/dev/full')
    return found + [Case("closed stream", ("pipeline.K=0",), ("pipeline.K=0",), shell=shell) for shell in closed]


def single_mistakes() -> list[Case]:
    """Returns all cases but those of keys and values, of which there are too many to run all."""
    return [*unknown_keys(), *words_and_options(), *groups(), *relations(), *files(), *other_commands()]


def drawn(count: int, seed: int = SEED) -> Iterator[Case]:
    """Yields single wrong values and, as often, two to five mistakes in different keys of one command line."""
    choose, of_keys = random.Random(seed), [*values(), *unknown_keys()]
    alone = values()
    choose.shuffle(alone)
    for number in range(count):
        if number % 2:
            command = choose.choice(("train", "train", "verify", "plan"))
            together = {case.names: case for case in choose.sample(of_keys, choose.randint(2, 5))}
            words = tuple(word for case in together.values() for word in case.words)
            yield Case("several", words, tuple(name for names in together for name in names), command)
        else:
            yield alone[number // 2 % len(alone)]


def cases(count: int = CASES) -> list[Case]:
    """Returns ``count`` cases of all kinds."""
    listed = single_mistakes()
    return [*listed, *drawn(count - len(listed))] if count > len(listed) else random.Random(SEED).sample(listed, count)


# -- running them ------------------------------------------------------------------------------------------------------


def run(case: Case) -> Answer:
    """Runs a case as a real command in an empty directory."""
    with tempfile.TemporaryDirectory(prefix="wrong-") as folder:
        for name, content in case.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        command = [sys.executable, "-m", f"gpipe_cli.commands.{case.command}", *case.words]
        began, before = time.monotonic(), os.times()
        done = subprocess.run(
            ["timeout", str(LONGEST), "bash", "-c", case.shell, "bash", *command],
            cwd=folder,
            env={**environment(), "GPIPE_CACHE": folder},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        wall, after = time.monotonic() - began, os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return Answer(done.returncode, done.stdout + done.stderr, processor, wall)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--count", type=int, default=CASES, help=f"cases (default: {CASES})")
    arguments = options.parse_args()
    chosen = cases(20 if arguments.quick else arguments.count)
    faults: list[str] = []

    def rows() -> Iterator[Row]:
        kinds = list(dict.fromkeys(case.kind for case in chosen))
        for kind in kinds:
            asked = [case for case in chosen if case.kind == kind]
            answers = [run(case) for case in asked]
            wrong = [answer.faults(case) for case, answer in zip(asked, answers, strict=True)]
            faults.extend(
                f"{case.command} {' '.join(case.words)}: {'; '.join(found)}"
                for case, found in zip(asked, wrong, strict=True) if found
            )  # fmt: skip
            yield {
                "kind": kind,
                "cases": len(asked),
                "refused": sum(not found for found in wrong),
                "slowest, s": max(answer.processor for answer in answers),
                "slowest, wall s": max(answer.wall for answer in answers),
                "longest, lines": max(len(answer.text.splitlines()) for answer in answers),
            }

    def notes(kept: Sequence[Row]) -> list[str]:
        total, refused = (sum(row[key] for row in kept) for key in ("cases", "refused"))
        slow, long = (max(row[key] for row in kept) for key in ("slowest, s", "longest, lines"))
        return [f"{refused} of {total} refused as they should be; slowest {slow:.2f} s, longest {long} lines", *faults]

    columns = {
        "kind": "",
        "cases": "d",
        "refused": "d",
        "slowest, s": ".2f",
        "slowest, wall s": ".2f",
        "longest, lines": "d",
    }
    report(columns, rows(), arguments.output, notes)


if __name__ == "__main__":
    main()
