"""Tries failures: planted faults, kills, wrong command lines; and healthy runs that raise no alarm."""
