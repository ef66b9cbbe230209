"""Measures the figures in docs/benchmarks.md; each module runs by ``python -m benchmarks.NAME``."""
