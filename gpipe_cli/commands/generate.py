"""gpipe-generate: continues texts with the language model of a run, in cells on workers as in training.

    gpipe-generate RUN prompt='Once upon a time'
    gpipe-generate RUN temperature=0 < beginnings.txt > texts.txt
    gpipe-generate RUN prompt= samples=5 top_p=0.9 length=200

checkpoint=PATH   a run directory, or one checkpoint: RUN/checkpoints/step_00000100; `checkpoint=` can be left out
step=N            of a run: the checkpoint of step N; step=best: the one with the lowest loss; step=last (default)
prompt=TEXT       the beginning of a text; nothing after the = begins a new text
                  Without a prompt standard input is read, one beginning a line. Each text is printed with its
                  beginning; of lines one text a line, in their order
scores=true       before each text the log-probability of what was added, and a tab
trust=[NAMES]     code of your own that the checkpoint may call, such as trust=[my_module.layers]

length=64         tokens that are added, at most; a text ends before if the model ends it
temperature=1     divides the logits: below 1 more probable texts; 0: always the most probable token (greedy)
top_k=N           draws from the N most probable tokens only
top_p=P           draws from the fewest most probable tokens that have the probability P together
seed=0            of the draws: the same seed gives the same texts, in any number of cells
samples=1         texts for each beginning

Any key of the run can be typed too, such as pipeline.K=4: any number of cells fits any checkpoint.
"""  # --help prints this

import sys
from collections.abc import Sequence
from typing import get_type_hints

from gpipe_cli.commands.lines import OWN, answer_lines, reopened, with_vocabularies
from gpipe_cli.config import SamplingSettings
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.terminal.command import read_words, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 when it failed, 2 when it was refused, 130 after Ctrl-C."""
    return run_command("gpipe-generate", arguments, __doc__, _generate, needs_words=True)


def _generate(words: Sequence[str]) -> int:
    prompt = next((word.partition("=")[2] for word in words if word.startswith("prompt=")), None)
    of_sampling = get_type_hints(SamplingSettings, include_extras=True)
    line = read_words([word for word in words if not word.startswith("prompt=")], {**OWN, **of_sampling})
    sampling = {key: value for key, value in line.own.items() if key in of_sampling}
    run = reopened("gpipe-generate", line)
    data = run.prepared.config["data"]
    if run.prepared.config["task"].get("generation"):
        raise ConfigurationError(f"{run.info.run_dir} translates, it does not continue texts: use gpipe-translate")
    length, end = data.get("sequence_length", 1), data.get("end_token")
    settings = with_vocabularies(run, sequence_length=length, end_token=end)
    scores = line.own.get("scores", False)
    return answer_lines(run, "gpipe_cli.inference.lines:generate", settings, scores, prompt, sampling=sampling)


if __name__ == "__main__":
    sys.exit(main())
