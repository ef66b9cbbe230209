"""``gpipe-export``: write a checkpoint's weights as one plain state_dict. Imports torch only once it has work to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_cli.checkpoint import files as checkpoint_files
from gpipe_cli.checkpoint.files import CheckpointError, CheckpointInfo
from gpipe_cli.terminal.frame import FAILED, REFUSED, answer, to_stderr

if TYPE_CHECKING:
    from torch import Tensor

HELP = """\
gpipe-export: write the weights of a checkpoint as one plain state_dict.

    gpipe-export checkpoint=RUN output=model.safetensors

checkpoint=PATH   a run directory (its newest checkpoint is taken), or one checkpoint: RUN/checkpoints/step_00000100
output=FILE       ends in .safetensors, or in .pt for torch.load(FILE, weights_only=True)
average=true      the moving averages of weights and BatchNorm statistics (trainer.average), as evaluation uses them
step=N            of a run: the checkpoint of step N; step=best takes the best one, step=last (default) the newest
overwrite=true    replace FILE if it exists

Weights and buffers are named <layer name>.<parameter>, in model order; optimizer state is left out. In Python:

    weights = safetensors.torch.load_file("model.safetensors")
    model = torch.nn.Sequential(OrderedDict((layer.name, layer.build()) for layer in layers))
    model.load_state_dict(weights)
"""
SUFFIXES = (".safetensors", ".pt")


@dataclass(frozen=True)
class Arguments:
    checkpoint: Path
    output: Path
    step: str = "last"
    overwrite: bool = False
    average: bool = False


class UsageError(ValueError):
    """The command line is wrong; the message says what to type."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 when the checkpoint cannot be exported, 2 for a wrong call."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = answer(words, HELP, needs_words=True)
    if code is not None:
        return code
    try:
        chosen = parse(words)
        info, warnings = checkpoint_files.choose(chosen.checkpoint, chosen.step)
        for warning in warnings:
            to_stderr(f"gpipe-export: warning: {warning}")
        print(export(info, chosen.output, chosen.average))
    except (UsageError, CheckpointError, OSError) as error:
        to_stderr(f"gpipe-export: {error}")
        return REFUSED if isinstance(error, UsageError) else FAILED
    return 0


def parse(words: Sequence[str]) -> Arguments:
    """Read ``key=value`` words.

    Raises:
        UsageError: a key is unknown or missing, a value does not fit, or the output exists already.
    """
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.lstrip("-").partition("=")
        if key not in ("checkpoint", "output", "step", "overwrite", "average") or not equals or not value:
            raise UsageError(
                f"{word}: use checkpoint=RUN output=FILE, step=N|best|last, average=true or overwrite=true (see --help)"
            )
        given[key] = value
    if missing := [key for key in ("checkpoint", "output") if key not in given]:
        raise UsageError(f"{missing[0]}= is missing, for example: gpipe-export checkpoint=RUN output=model.safetensors")
    step, output = given.get("step", "last"), Path(given["output"])
    yes = {}
    for key in ("overwrite", "average"):
        if given.get(key, "false") not in ("true", "false"):
            raise UsageError(f"{key}={given[key]}: use true or false")
        yes[key] = given.get(key) == "true"
    if step not in ("last", "best") and not step.isdigit():
        raise UsageError(f"step={step}: use a number, best or last")
    if output.suffix not in SUFFIXES:
        raise UsageError(f"output={output}: the name must end in {' or '.join(SUFFIXES)}")
    if output.exists() and not yes["overwrite"]:
        raise UsageError(f"output={output} exists: add overwrite=true to replace it")
    return Arguments(Path(given["checkpoint"]).expanduser(), output, step, **yes)


def export(info: CheckpointInfo, output: Path, average: bool = False) -> str:
    """Write the state_dict, replacing ``output`` only once it is whole; returns a line about what was written."""
    from gpipe_cli.checkpoint.snapshot import export_state_dict

    weights = export_state_dict(info, average)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = checkpoint_files.with_suffix(output, ".tmp")
    _save(weights, temporary, output.suffix, info.step)
    temporary.replace(output)
    numbers = sum(tensor.numel() for tensor in weights.values())
    return (
        f"{output}: {len(weights)} tensors of {len(info.layers)} layers, {numbers:,} numbers, "
        f"{output.stat().st_size / 1e6:.1f} MB, from step {info.step} of {info.path}"
    )


def _save(weights: dict[str, Tensor], path: Path, suffix: str, step: int) -> None:
    import torch
    from safetensors.torch import save_file

    if suffix == ".pt":
        torch.save(weights, path)
    else:
        save_file(weights, path, {"format": "pt", "step": str(step)})


if __name__ == "__main__":
    sys.exit(main())
