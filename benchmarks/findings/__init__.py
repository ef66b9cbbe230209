"""Finds the paper's findings in small, for docs/measurements/findings.md: pieces of minutes, each kept in a log."""
