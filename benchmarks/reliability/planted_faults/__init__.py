"""Plants faults in the engine and the trainer, one at a time, to see that gpipe-verify notices (`faults.py`)."""
