"""Explains the differences that gpipe-verify has found: the layer that differs first, and the most likely cause."""
