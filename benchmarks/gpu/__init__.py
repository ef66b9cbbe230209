"""Proves and measures the tool on a machine with GPUs: `python -m benchmarks.gpu` (docs/gpu.md)."""
