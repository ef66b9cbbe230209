"""Tries failures: planted faults, kills, full disks, wrong command lines; and healthy runs that raise no alarm."""
