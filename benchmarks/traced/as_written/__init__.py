"""Holds small modules as researchers write them, with habits that a trace could lose; all run under torch alone."""

from benchmarks.traced.as_written import blocks, operations, state, weights
from benchmarks.traced.as_written.given import written

__all__ = ["blocks", "operations", "state", "weights", "written"]
