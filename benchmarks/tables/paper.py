"""Holds the figures of the paper's tables 1 to 4 (NeurIPS 2019)."""

from dataclasses import dataclass

Throughputs = dict[tuple[int, int], float]  # by (K, M)


def _throughputs(rows: dict[int, tuple[float, float, float]]) -> Throughputs:
    """Reads rows of M with columns K = 2, 4, 8, as they are printed."""
    return {(K, M): value for M, row in rows.items() for K, value in zip((2, 4, 8), row, strict=True)}


# Table 2: AmoebaNet-D (18,256) and Transformer-48 on TPUs, in units of K=2, M=1.
TABLE_2 = {
    "amoebanet": _throughputs({1: (1.0, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)}),
    "transformer": _throughputs({1: (1.0, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)}),
}

# Table 3: AmoebaNet-D (18,128) and Transformer-24 on P100 GPUs without NVLink, M=32, in units of K=2.
TABLE_3 = {"amoebanet": _throughputs({32: (1.0, 1.7, 2.7)}), "transformer": _throughputs({32: (1.0, 1.8, 3.3)})}

# Table 4: shares of a step. The slice of the weight update has no label: it is what the others leave.
TABLE_4 = {"computation": 0.656, "recomputation": 0.225, "bubble": 0.041}
TABLE_4 |= {"load_imbalance": 0.032, "setup": 0.029, "weight_update": 0.017}


@dataclass(frozen=True)
class Capacity:
    """Describes one column of table 1: the largest model that fits.

    Attributes:
        K: accelerators.
        naive: without pipeline and re-materialization.
        sizes: L and, for AmoebaNet, D.
        parameters: number of parameters, as printed.
    """

    K: int
    naive: bool
    sizes: tuple[int, ...]
    parameters: float


TABLE_1 = {
    "amoebanet": (
        Capacity(1, True, (18, 208), 82e6),
        Capacity(1, False, (18, 416), 318e6),
        Capacity(2, False, (18, 544), 542e6),
        Capacity(4, False, (36, 544), 1.05e9),
        Capacity(8, False, (72, 512), 1.8e9),
    ),
    "transformer": (
        Capacity(1, True, (3,), 282.2e6),
        Capacity(1, False, (13,), 785.8e6),
        Capacity(8, False, (103,), 5.3e9),
        Capacity(32, False, (415,), 21.0e9),
        Capacity(128, False, (1663,), 83.9e9),
    ),
}
