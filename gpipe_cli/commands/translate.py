"""gpipe-translate: translates lines with the model of a run, in cells on workers as in training.

    gpipe-translate RUN < sentences.txt > translations.txt
    echo 'lunes, 3 de abril de 1995' | gpipe-translate RUN

It reads UTF-8 text, one sentence a line. Translations come in the order of the lines, an empty one for an empty line.

checkpoint=PATH   a run directory, or one checkpoint: RUN/checkpoints/step_00000100; `checkpoint=` can be left out
step=N            of a run: the checkpoint of step N; step=best: the one with the lowest loss; step=last (default)
scores=true       before each translation its log-probability and a tab
trust=[NAMES]     code of your own that the checkpoint may call, such as trust=[my_module.layers]

Any key of the run can be typed too, for example

pipeline.K=4                  cells; any number fits any checkpoint. pipeline.workers, pipeline.M likewise
task.generation.beam=8        hypotheses kept for each sentence; 1: greedy
task.generation.length_exponent=0.5   favours longer translations: scores are divided by ((tokens + 5) / 5)^exponent
task.generation.group=64      sentences that are translated together
"""  # --help prints this

import sys
from collections.abc import Sequence

from gpipe_cli.commands.lines import OWN, answer_lines, reopened, with_vocabularies
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.terminal.command import read_words, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 when it failed, 2 when it was refused, 130 after Ctrl-C."""
    return run_command("gpipe-translate", arguments, __doc__, _translate, needs_words=True)


def _translate(words: Sequence[str]) -> int:
    line = read_words(words, OWN)
    run = reopened("gpipe-translate", line)
    if not run.prepared.config["task"].get("generation"):
        raise ConfigurationError(
            f"{run.info.run_dir}: its task has no section generation, so it does not translate; texts are continued by "
            "gpipe-generate. If its model is a translation, type "
            "+task.generation='{per_language:1,per_language_at_end:1,group:64,max_length:64}'"
        )
    scores = line.own.get("scores", False)
    return answer_lines(run, "gpipe_cli.inference.lines:translate", with_vocabularies(run), scores)


if __name__ == "__main__":
    sys.exit(main())
