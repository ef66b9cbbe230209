"""Trains neural networks with pipeline parallelism, as in GPipe (Huang et al., NeurIPS 2019)."""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING
from typing import Any as _Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .layers import LayerBuilder
    from .library.pipeline import Pipeline
    from .tasks.base import Task


# In a clone, conf/, models/ and data/ stand beside this folder; an installed wheel has them inside it. Looking in
# both places gives them one import name (`gpipe_cli.models`) in a clone, an editable install, a wheel and a worker.
_clone = _Path(__file__).resolve().parent.parent
if (_clone / "pyproject.toml").is_file() and (_clone / "conf").is_dir():
    __path__.append(str(_clone))

# docs/library.md says what they promise.
_PUBLIC = {"LayerBuilder": "layers", "Pipeline": "library.pipeline", "Task": "tasks.base"}
__all__ = ["LayerBuilder", "Pipeline", "Task"]  # made when asked for: the commands' own process imports no torch


def __getattr__(name: str) -> _Any:
    """Returns a public name, whose module is imported at its first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f"{__name__}.{_PUBLIC[name]}"), name)
