"""gpipe-export: writes the weights of a checkpoint as one plain state_dict.

    gpipe-export RUN                                                  writes RUN/model.safetensors
    gpipe-export RUN step=best output=best.safetensors

checkpoint=PATH   a run directory, or one checkpoint: RUN/checkpoints/step_00000100; `checkpoint=` can be left out
step=N            of a run: the checkpoint of step N; step=best: the one with the lowest loss; step=last (default)
output=FILE       ends in .safetensors
average=true      the moving averages of weights and BatchNorm statistics (trainer.average), as evaluation uses them
overwrite=true    replaces FILE if it exists

Weights and buffers are named <layer name>.<parameter>; optimizer state is left out. In Python, for each layer:

    weights, start = safetensors.torch.load_file("model.safetensors"), layer.name + "."
    own = {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
    layer.build().load_state_dict(own)
"""  # --help prints this

import sys
from collections.abc import Sequence
from pathlib import Path

from gpipe_cli.checkpoint.files import find
from gpipe_cli.disk import whole_file, writing
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs.run_directory import require_writable
from gpipe_cli.terminal.command import read_words, run_command, show, to_stderr

OWN = {"checkpoint": str, "output": str, "step": str, "overwrite": bool, "average": bool}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0; 1 for a file that cannot be written; 2 for a wrong call."""
    return run_command("gpipe-export", arguments, __doc__, _run, needs_words=True)


def _run(words: Sequence[str]) -> int:
    line = read_words(words, OWN, overrides=False)
    output = Path(line.own.get("output", "model.safetensors"))
    if output.suffix != ".safetensors":
        raise ConfigurationError(f"output={output}: the name must end in .safetensors")
    info, warnings = find(Path(line.run("gpipe-export")).expanduser(), line.own.get("step", "last"))
    if "output" not in line.own:
        output = info.run_dir / output
    if output.exists() and not (line.own.get("overwrite") and output.is_file()):
        what = "add overwrite=true to replace it" if output.is_file() else "it is no file, so name another"
        raise ConfigurationError(f"output={output} exists: {what}")
    require_writable("output", output, is_file=True)
    for warning in warnings:
        to_stderr(f"gpipe-export: warning: {warning}")
    with writing(output), whole_file(output) as draft:
        from gpipe_cli.checkpoint.layer_state import export_state_dict, save_tensors  # torch is slow

        weights = export_state_dict(info, line.own.get("average", False))
        save_tensors(weights, draft, {"format": "pt", "step": str(info.step)})
    numbers = sum(tensor.numel() for tensor in weights.values())
    show(
        f"{output}: {len(weights)} tensors of {len(info.layers)} layers, {numbers:,} numbers, "
        f"{output.stat().st_size / 1e6:.1f} MB, from step {info.step} of {info.path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
