"""Measures the paper's tables, with emulated accelerators where there are too few devices."""
