"""Trains neural networks with pipeline parallelism, as in GPipe (Huang et al., NeurIPS 2019)."""

from pathlib import Path as _Path

__version__ = "0.1.0"

# In a clone, conf/, models/ and data/ stand beside this folder; an installed wheel has them inside it. Looking in
# both places gives them one import name (`gpipe_cli.models`) in a clone, an editable install, a wheel and a worker.
_clone = _Path(__file__).resolve().parent.parent
if (_clone / "pyproject.toml").is_file() and (_clone / "conf").is_dir():
    __path__.append(str(_clone))
