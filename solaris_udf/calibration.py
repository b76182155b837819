"""Calibration of probabilities: isotonic regression as a small table."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Isotonic:
    """A non-decreasing map of [0, 1] onto itself: linear between the points (x [m], y [m]), x strictly ascending."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        x, y = np.asarray(self.x), np.asarray(self.y)
        if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
            raise ValueError("a calibration table needs two or more points, as many x as y")
        if (np.diff(x) <= 0).any() or (np.diff(y) < 0).any() or x[0] != 0 or x[-1] != 1 or y[0] < 0 or y[-1] > 1:
            raise ValueError("a calibration table must ascend from x = 0 to x = 1 with y within [0, 1]")

    def apply(self, probability: Float64) -> Float64:
        """Calibrated probabilities [n]."""
        return np.interp(probability, self.x, self.y)


IDENTITY = Isotonic((0.0, 1.0), (0.0, 1.0))


def fit_isotonic(probability: Float64, label: Float64, bins: int = 100) -> Isotonic:
    """Fits the table on predictions [n] and what happened, 0 or 1 [n].

    Pool adjacent violators (Barlow et al., 1972) over equally filled bins of the predictions: single rows would make
    steps of one lucky row each. The ends are pinned to (0, 0) and (1, 1). Returns IDENTITY for no rows or for one
    class only.
    """
    if len(probability) == 0 or label.min() == label.max():
        return IDENTITY
    order = np.argsort(probability, kind="stable")
    blocks: list[list[float]] = []  # [sum of x, sum of y, rows]
    for part in np.array_split(order, min(bins, max(1, len(order) // 20))):
        blocks.append([float(probability[part].sum()), float(label[part].sum()), float(len(part))])
        while len(blocks) > 1 and blocks[-2][1] * blocks[-1][2] >= blocks[-1][1] * blocks[-2][2]:
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    x, y = [0.0], [0.0]
    for sum_x, sum_y, rows in blocks:
        mean_x, mean_y = sum_x / rows, sum_y / rows
        if x[-1] < mean_x < 1:
            x.append(mean_x)
            y.append(mean_y)
    return Isotonic((*x, 1.0), (*y, 1.0))
