"""Plants faults in the engine and the trainer, one at a time, and asks gpipe-verify whether it notices.

    python -m benchmarks.reliability.planted_faults                      all faults, about three minutes
    python -m benchmarks.reliability.planted_faults clipping_forgotten   one, with what gpipe-verify said

A fault is a function that replaces one function of gpipe_cli in a worker (`fault.py`); it counts as caught when
gpipe-verify finds a difference, and as named when its findings contain both the place and the cause that stand beside
the fault.
"""
