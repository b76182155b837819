"""From predictions on identical rows to figures with intervals: what each feature set is worth beside the base."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solaris_udf.metrics import (
    Float64,
    Resampled,
    auc,
    auc_influence,
    by_user,
    calibration,
    entropy,
    interval,
    losses,
    relative_log_loss,
    resample,
    transfer_ratio,
)

Predictions = Mapping[tuple[str, str], Float64]
BASE, FM, FRESH = ("vm", "base"), ("fm", "slice_start"), ("fm", "fresh")
# A transfer ratio's ceiling: the foundation model with the inputs of the slice's start, which is what an embedding had,
# or with those of the very moment.
RATIOS = {"transfer_ratio": FM, "transfer_ratio_fresh": FRESH}
ALL_SEEDS = -1


@dataclass(frozen=True)
class Figure:
    """One measured figure. value is None where it can't be stated, and note says why. seed -1: over all seeds.

    rows: how many rows it is of; None: all that evaluate.
    """

    model: str
    feature_set: str
    seed: int
    metric: str
    value: float | None
    ci_low: float | None = None
    ci_high: float | None = None
    note: str | None = None
    rows: int | None = None


def figures(
    label: npt.ArrayLike,
    user: npt.NDArray[np.int64],
    predictions: Predictions,
    seeds: list[int],
    replicates: int = 1000,
) -> list[Figure]:
    """Log loss, NE, RLL, AUC, calibration and transfer ratio of each (model, feature set), per seed and over all.

    label [n] in {0, 1}; user [n] numbers from 0; predictions: (model, feature set) -> [seeds, n], or [1, n] for what
    has no seed; they must hold BASE. Intervals are 95%, by a paired bootstrap over users and seeds; that of the AUC is
    of its first-order expansion, which is a sum over users (see auc_influence).
    """
    y = np.asarray(label, dtype=np.float64)
    users = int(user.max()) + 1
    sums: dict[str, npt.ArrayLike] = {"rows": np.bincount(user, minlength=users), "positives": by_user(y, user, users)}
    row_losses = {key: np.stack([losses(y, p) for p in values]) for key, values in predictions.items()}
    for key, values in predictions.items():
        sums[_name("loss", key)] = by_user(row_losses[key], user, users)
        sums[_name("predicted", key)] = by_user(values, user, users)
        # Each user's part of the AUC: they sum to it, and their draws to that of drawn users.
        area = np.array([auc(y, p) for p in values])[:, None]
        sums[_name("auc", key)] = area / users + by_user(np.stack([auc_influence(y, p) for p in values]), user, users)
    drawn = _Drawn(resample(sums, replicates, seed=len(seeds)))
    found: list[Figure] = []
    base_loss = row_losses[BASE].mean(axis=1)
    for key, values in predictions.items():
        found += _per_seed(key, y, values, row_losses[key].mean(axis=1), base_loss, seeds)
        found += drawn.overall(key)
    return found + list(drawn.transfer_ratios(predictions))


def _per_seed(
    key: tuple[str, str], y: Float64, values: Float64, loss: Float64, base: Float64, seeds: list[int]
) -> Iterator[Figure]:
    if len(values) != len(seeds):
        return
    rate_entropy = float(entropy(y.mean()))
    for seed, p, own, beside in zip(seeds, values, loss, base, strict=True):
        stated = {
            "log_loss": own,
            "ne": own / rate_entropy if rate_entropy else math.nan,
            "auc": auc(y, p),
            "calibration": calibration(y, p),
        }
        if key != BASE:
            stated["rll"] = relative_log_loss(own, beside)
        for metric, value in stated.items():
            yield Figure(*key, seed, metric, _finite(float(value)))


class _Drawn:
    """Metrics over all seeds, of the sums as they are and of every draw alike."""

    def __init__(self, sums: Resampled) -> None:
        self._sides = [{name: np.asarray(value) for name, value in sums.point.items()}, dict(sums.draws)]

    def overall(self, key: tuple[str, str]) -> Iterator[Figure]:
        yield self._figure(key, "log_loss", [self._loss(side, key) for side in self._sides])
        yield self._figure(key, "ne", [self._ne(side, key) for side in self._sides])
        if key != BASE:
            rll = [relative_log_loss(self._loss(side, key), self._loss(side, BASE)) for side in self._sides]
            yield self._figure(key, "rll", rll)
        yield self._figure(
            key, "calibration", [_ratio(side[_name("predicted", key)], side["positives"]) for side in self._sides]
        )
        yield self._figure(key, "auc", [side[_name("auc", key)] for side in self._sides])

    def transfer_ratios(self, predictions: Predictions) -> Iterator[Figure]:
        """The part of each ceiling's advantage that each feature set carries over.

        A ratio whose denominator may be 0 is explained and not stated.
        """
        sets = [key for key in predictions if key[0] == "vm" and key != BASE]
        ceilings = {name: fm for name, fm in RATIOS.items() if fm in predictions}
        if not ceilings:
            for key in sets:
                yield Figure(*key, ALL_SEEDS, "transfer_ratio", None, note="no foundation model to compare with")
        for metric, fm in ceilings.items():
            gap = [self._ne(side, BASE) - self._ne(side, fm) for side in self._sides]
            low, high = interval(gap[1])
            for key in sets:
                if low > 0:
                    ratios = [transfer_ratio(*(self._ne(side, one) for one in (BASE, key, fm))) for side in self._sides]
                    yield self._figure(key, metric, ratios)
                else:
                    note = (
                        f"the foundation model's advantage over the base in NE is {float(gap[0]):.4f} "
                        f"[{low:.4f}, {high:.4f}], not surely above 0, so there is nothing to take a part of"
                    )
                    yield Figure(*key, ALL_SEEDS, metric, None, note=note)

    def _loss(self, side: Mapping[str, Float64], key: tuple[str, str]) -> Float64:
        return side[_name("loss", key)] / side["rows"]

    def _ne(self, side: Mapping[str, Float64], key: tuple[str, str]) -> Float64:
        return _ratio(self._loss(side, key), entropy(side["positives"] / side["rows"]))

    def _figure(self, key: tuple[str, str], metric: str, sides: list[Float64]) -> Figure:
        low, high = interval(sides[1])
        return Figure(*key, ALL_SEEDS, metric, _finite(float(sides[0])), _finite(low), _finite(high))


def _ratio(top: Float64, bottom: Float64) -> Float64:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(bottom > 0, top / bottom, np.nan))


def _name(what: str, key: tuple[str, str]) -> str:
    return "/".join((what, *key))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
