"""Passes the figures of a run on to trackers of experiments: TensorBoard, Weights & Biases, or a user's own.

A tracker has some of `start(config, run_dir)`, `log(step, numbers)`, `samples(step, samples)` (translations beside
their references), `picture(name, path)` and `finish(summary)`. They are called one after the other in a thread of its
own, so that a slow one delays nothing; after its first error it is left alone.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from ..disk import write_whole

FINISH_SECONDS = 30.0  # that the end of a run waits for it


class Tracking:
    """Calls one tracker in a thread. After its first error, which ``warn`` gets, it is called no more."""

    def __init__(self, tracker: Any, warn: Callable[[str], None]) -> None:
        self._tracker, self._warn, self._calls = tracker, warn, SimpleQueue[tuple[str, Any]]()
        self._given_up = False
        self._thread = Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: object) -> None:
        """Queues a call; never waits."""
        if not self._given_up:
            self._calls.put((method, arguments))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Queues the last call, and waits for it `FINISH_SECONDS` at most."""
        self.call("finish", summary)
        self._thread.join(0.0 if self._given_up else FINISH_SECONDS)
        if self._thread.is_alive():
            self._give_up(f"it did not finish within {FINISH_SECONDS:.0f} s")

    def _work(self) -> None:
        method = ""
        while method != "finish" and not self._given_up:
            method, arguments = self._calls.get()
            try:
                getattr(self._tracker, method, lambda *_: None)(*arguments)
            except (Exception, SystemExit) as error:
                self._give_up(f"{method}: {type(error).__name__}: {' '.join(str(error).split())}")

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = True
            self._warn(f"tracker {type(self._tracker).__name__}: {why}; the run goes on without it")


class TensorBoard:
    """Tracks by TensorBoard's files; shows samples as well.

    Args:
        resumed_step: the step that the run resumes from; what an earlier process wrote for later steps is hidden.
    """

    def __init__(self, resumed_step: int) -> None:
        self._begin = resumed_step + 1

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import, and only rank 0 needs it

        # Files in the folder are new ones: named by second, host and process.
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=self._begin)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        for number, sample in enumerate(samples):
            text = "**{language}** {source}\n\n* reference: {reference}\n* output: {output}".format_map(sample)
            self._writer.add_text(f"samples/{number}", text, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


class WandB:
    """Tracks by Weights & Biases; takes the arguments of wandb.init, and its environment variables.

    A run that is resumed in its own directory goes on under the id that it had, kept in `wandb/id`.
    """

    def __init__(self, **options: Any) -> None:
        self._options, self._step = {"project": "gpipe", **options}, 0  # a call without it would begin another step

    def start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        import wandb  # slow

        own = {"config": dict(config), "dir": str(run_dir), "name": run_dir.name}
        kept, resumed = run_dir / "wandb" / "id", config["checkpoint"]["resume"]
        if resumed is not None and Path(resumed).is_relative_to(run_dir.absolute()) and kept.is_file():
            own |= {"id": kept.read_text(), "resume": "allow"}
        self._wandb, settings = wandb, wandb.Settings(console="off")
        self._run = wandb.init(**{**own, "settings": settings, **self._options})
        kept.parent.mkdir(exist_ok=True)
        write_whole(kept, self._run.id)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(numbers), step=step)

    def picture(self, name: str, path: Path) -> None:
        shown = self._wandb.Html(path.read_text()) if path.suffix == ".svg" else self._wandb.Image(str(path))
        self._run.log({name: shown}, step=self._step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish()
