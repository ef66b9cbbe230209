"""Tries failures: planted faults, kills, wrong command lines."""
