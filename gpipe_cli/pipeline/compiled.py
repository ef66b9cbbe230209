"""Compiles each layer by torch.compile, so that the bits still depend neither on the cut nor on earlier shapes."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
import torch._dynamo
from torch import nn

from ..errors import ConfigurationError

COMPILED_BACKWARD = (
    "pipeline.schedule=zero_bubble with pipeline.compile=true: the backward of a compiled layer cannot be divided, so "
    "the bubble is that of 1f1b; pipeline.compile=false divides it"
)
MOST_VARIANTS = 4096  # of one layer: by shapes, by types, with and without a graph


def require_compiler(device: torch.device) -> None:
    """Refuses a machine without the compiler that torch.compile needs.

    Raises:
        ConfigurationError: it names what is missing.
    """
    name, default = ("CC", "gcc") if device.type == "cuda" else ("CXX", "g++")
    compiler = os.environ.get(name, default)
    if shutil.which(compiler) is None:
        raise ConfigurationError(
            f"pipeline.compile=true needs a compiler, and there is no {compiler} on this machine: install it, name "
            f"another one by the environment variable {name}, or use pipeline.compile=false"
        )


def compile_layer(module: nn.Module) -> bool:
    """Compiles the forward of a layer, for each shape anew; parameters keep their names.

    Returns:
        False where it stays as it is: a layer with `begin_step` would be compiled again in every step.
    """
    if any(hasattr(inner, "begin_step") for inner in module.modules()):
        return False
    config: Any = torch._dynamo.config
    # A kernel for varying shapes would depend on the shapes that came first, and so on where a run was resumed. For the
    # same reason too many variants are an error: torch would go on without compiling.
    config.recompile_limit = config.accumulated_recompile_limit = MOST_VARIANTS
    config.fail_on_recompile_limit_hit = True
    # The attribute, not the module: its hooks run around it, and the names of its parameters stay.
    layer: Any = module
    layer.forward = torch.compile(module.forward, dynamic=False)
    return True
