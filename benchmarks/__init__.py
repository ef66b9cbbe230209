"""Measures the figures in docs/measurements/benchmarks.md; each module runs by ``python -m benchmarks.NAME``."""
