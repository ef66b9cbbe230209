"""Measuring: emulated accelerators, peers, and the paper's tables."""
