"""Finds the paper's findings in small: pieces of minutes, each one run, kept in a log (docs/findings.md)."""
