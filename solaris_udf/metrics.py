"""Metrics of click prediction, and their bootstrap over users. Pure numpy.

Everything takes labels y in {0, 1} and probabilities p, both [n]; probabilities are kept away from 0 and 1 by EPSILON,
so that one confident mistake gives a large loss and not an infinite one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
EPSILON = 1e-7
# Weights of a chunk of bootstrap replicates: replicates x users <= this many float64 (32 MB).
_CHUNK_CELLS = 4_000_000


def losses(y: npt.ArrayLike, p: npt.ArrayLike) -> Float64:
    """The log loss of each row in nats, [n]. Raises ValueError for other shapes, labels or probabilities."""
    label, probability = _checked(y, p)
    clipped = np.clip(probability, EPSILON, 1 - EPSILON)
    result: Float64 = -(label * np.log(clipped) + (1 - label) * np.log1p(-clipped))
    return result


def log_loss(y: npt.ArrayLike, p: npt.ArrayLike) -> float:
    """Mean log loss in nats; NaN for no rows."""
    rows = losses(y, p)
    return float(rows.mean()) if len(rows) else float("nan")


def entropy(rate: npt.ArrayLike) -> Float64:
    """Entropy of a Bernoulli variable in nats, elementwise; 0 at rates 0 and 1."""
    share = np.asarray(rate, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.where((share > 0) & (share < 1), -(share * np.log(share) + (1 - share) * np.log1p(-share)), 0.0)
    return np.asarray(parts, dtype=np.float64)


def normalized_entropy(y: npt.ArrayLike, p: npt.ArrayLike) -> float:
    """Mean log loss / entropy of the base rate of these very rows (He et al., 2014). Below 1 beats the constant.

    NaN where the rows are all of one class: their entropy is 0.
    """
    label, _ = _checked(y, p)
    base = float(entropy(label.mean())) if len(label) else 0.0
    return log_loss(y, p) / base if base > 0 else float("nan")


def relative_log_loss(new: npt.ArrayLike, base: npt.ArrayLike) -> Float64:
    """100 * (new - base) / base, in percent, elementwise; negative is better. NaN where base is 0."""
    return 100.0 * _divided(np.subtract(new, base, dtype=np.float64), base)


def auc(y: npt.ArrayLike, p: npt.ArrayLike) -> float:
    """Area under the ROC curve: P(a positive is ranked above a negative), ties counted half. NaN for one class."""
    label, probability = _checked(y, p)
    positives = float(label.sum())
    negatives = len(label) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, place, counts = np.unique(probability, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank = last - (counts - 1) / 2.0  # ranks from 1; tied rows share their mean
    rank_sum = float(mean_rank[place][label == 1].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)


def auc_influence(y: npt.ArrayLike, p: npt.ArrayLike) -> Float64:
    """The influence of each row on the AUC, [n], summing to 0: weights w on the rows make it AUC + sum(w * influence).

    To first order, that is, which makes the AUC a sum over rows that a bootstrap can draw: the share of the other
    class that a row is on the right side of, less the AUC, over the rows of its class (the structural components of
    DeLong et al., 1988). All NaN for one class.
    """
    label, probability = _checked(y, p)
    positive = label == 1
    sizes = np.array([len(label) - positive.sum(), positive.sum()], dtype=np.float64)
    if not sizes.all():
        return np.full(len(label), np.nan)
    _, place = np.unique(probability, return_inverse=True)
    counts = np.stack([np.bincount(place[chosen], minlength=place.max() + 1) for chosen in (~positive, positive)])
    below = np.cumsum(counts, axis=1) - counts / 2.0  # of each class, ties half
    right = np.where(positive, below[0, place] / sizes[0], 1 - below[1, place] / sizes[1])
    return np.asarray((right - right[positive].mean()) / sizes[positive.astype(int)])


def calibration(y: npt.ArrayLike, p: npt.ArrayLike) -> float:
    """Sum of predictions / sum of labels; 1 is calibrated. NaN without positives."""
    label, probability = _checked(y, p)
    positives = float(label.sum())
    return float(probability.sum()) / positives if positives else float("nan")


def transfer_ratio(ne_vm: npt.ArrayLike, ne_vm_with: npt.ArrayLike, ne_fm: npt.ArrayLike) -> Float64:
    """(NE_VM - NE_VM+x) / (NE_VM - NE_FM), elementwise: the part of the FM's advantage that x carries over.

    NaN where it has none.
    """
    gains = np.subtract(ne_vm, ne_vm_with, dtype=np.float64)
    return _divided(gains, np.subtract(ne_vm, ne_fm, dtype=np.float64))


@dataclass(frozen=True)
class Resampled:
    """Sums over rows: as they are, and under each bootstrap replicate.

    point: name -> sum over all users, averaged over seeds. draws: name -> [replicates], the same draw of users and
    seeds for every name, so that differences and ratios of names are paired.
    """

    point: dict[str, float]
    draws: dict[str, Float64]


def resample(sums: Mapping[str, npt.ArrayLike], replicates: int = 1000, seed: int = 0) -> Resampled:
    """The paired bootstrap by user: users are drawn with replacement, and so are training seeds.

    sums: name -> [users] or [seeds, users], the sum over each user's rows of something additive (rows, losses, labels).
    Rows of one user depend on each other, so users are drawn and not rows (Efron and Tibshirani, 1993). Memory is
    bounded by a chunk of replicates. Raises ValueError if there are no users or the shapes disagree.
    """
    arrays = {name: np.atleast_2d(np.asarray(values, dtype=np.float64)) for name, values in sums.items()}
    users = {values.shape[1] for values in arrays.values()}
    seeds = {values.shape[0] for values in arrays.values()} - {1}
    if len(users) != 1 or 0 in users or len(seeds) > 1:
        shapes = {name: values.shape for name, values in arrays.items()}
        raise ValueError(f"sums must be [users] or [seeds, users] of one size: {shapes}")
    count, seed_count = users.pop(), (seeds.pop() if seeds else 1)
    rng = np.random.default_rng(seed)
    seed_weight = rng.multinomial(seed_count, np.full(seed_count, 1 / seed_count), size=replicates) / seed_count
    stacked = np.concatenate(list(arrays.values()))
    chunk = max(1, _CHUNK_CELLS // count)
    totals = np.empty((replicates, len(stacked)))
    for start in range(0, replicates, chunk):
        size = min(chunk, replicates - start)
        # Drawing indexes and counting them is several times faster than a multinomial over many users.
        drawn = rng.integers(0, count, size=(size, count)) + np.arange(size)[:, None] * count
        weight = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count).astype(np.float64)
        totals[start : start + size] = weight @ stacked.T
    point: dict[str, float] = {}
    draws: dict[str, Float64] = {}
    place = 0
    for name, values in arrays.items():
        own = totals[:, place : place + len(values)]
        place += len(values)
        point[name] = float(values.sum(axis=1).mean())
        draws[name] = own[:, 0] if len(values) == 1 else (own * seed_weight).sum(axis=1)
    return Resampled(point, draws)


def interval(draws: npt.ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """The percentile interval of bootstrap draws; (NaN, NaN) if any is not finite."""
    values = np.asarray(draws, dtype=np.float64)
    if not len(values) or not np.isfinite(values).all():
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def by_user(values: npt.ArrayLike, user: npt.NDArray[np.int64], users: int) -> Float64:
    """Sums rows by user: values [n] or [seeds, n], user [n] in 0..users-1 -> [users] or [seeds, users]."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 1:
        return np.bincount(user, weights=array, minlength=users).astype(np.float64)
    return np.stack([np.bincount(user, weights=row, minlength=users) for row in array]).astype(np.float64)


def _divided(top: npt.ArrayLike, bottom: npt.ArrayLike) -> Float64:
    """top / bottom, NaN where bottom is 0."""
    under = np.asarray(bottom, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(under != 0, np.asarray(top, dtype=np.float64) / under, np.nan))


def _checked(y: npt.ArrayLike, p: npt.ArrayLike) -> tuple[Float64, Float64]:
    label = np.asarray(y, dtype=np.float64)
    probability = np.asarray(p, dtype=np.float64)
    if label.ndim != 1 or label.shape != probability.shape:
        raise ValueError(f"labels and probabilities must be [n] of one length: {label.shape}, {probability.shape}")
    if not np.isin(label, (0.0, 1.0)).all():
        raise ValueError("a label is neither 0 nor 1")
    if not ((probability >= 0) & (probability <= 1)).all():
        raise ValueError("a probability is outside [0, 1] or not a number")
    return label, probability
