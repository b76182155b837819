"""What training minimizes and what it is judged by."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from solaris_udf.foundation.items import Int64
from solaris_udf.foundation.samples import Samples


def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over tasks of the mean log loss of the rows whose label is known. [R, T], [R, T] with NaN -> scalar."""
    known = ~torch.isnan(labels)
    losses = F.binary_cross_entropy_with_logits(logits, torch.nan_to_num(labels), reduction="none") * known
    return (losses.sum(dim=0) / known.sum(dim=0).clamp(min=1)).sum()


def split_by_time(samples: Samples, share: float) -> tuple[Int64, Int64]:
    """Entries to train on and entries to validate on: the latest `share` of the rows by time. No time is in both."""
    if not len(samples):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    cut = np.quantile(samples.at, 1 - share, method="lower")
    late = samples.users.at > cut
    return np.flatnonzero(~late), np.flatnonzero(late)


def click_loss(labels: npt.NDArray[np.float32], logits: npt.NDArray[np.float32]) -> tuple[float, float]:
    """Mean log loss of the clicks, and that over the entropy of their own rate; NaN where it is not defined."""
    if not len(labels):
        return float("nan"), float("nan")
    click, logit = labels[:, 0].astype(np.float64), logits[:, 0].astype(np.float64)
    loss = float(np.mean(np.logaddexp(0, logit) - click * logit))
    rate = float(click.mean())
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)) if 0 < rate < 1 else float("nan")
    return loss, float(loss / entropy)


def baseline_ne(samples: Samples, training: Int64, validation: Int64) -> float:
    """NE of a logistic regression on the training rows' smoothed click rates of user, item and category."""
    train_rows = np.flatnonzero(np.isin(samples.state, training))
    test_rows = np.flatnonzero(np.isin(samples.state, validation))
    if not len(test_rows):
        return float("nan")
    clicks = samples.labels[:, 0]
    rate = float(clicks[train_rows].mean())
    columns = []
    for key in (samples.users.user_id[samples.state], samples.item_id, samples.items.category(samples.row)):
        code = np.unique(key, return_inverse=True)[1]
        shown = np.bincount(code[train_rows], minlength=code.max() + 1)
        clicked = np.bincount(code[train_rows], weights=clicks[train_rows], minlength=code.max() + 1)
        # A training row's own click does not count for it.
        own, own_shown = np.zeros(len(code)), np.zeros(len(code))
        own[train_rows], own_shown[train_rows] = clicks[train_rows], 1
        smooth = (clicked[code] - own + 20 * rate + 1e-3) / (shown[code] - own_shown + 20 + 2e-3)
        columns.append(np.log(smooth / (1 - smooth)))
    features = torch.from_numpy(np.stack([*columns, np.ones(len(samples))], axis=1))
    target = torch.from_numpy(clicks.astype(np.float64))
    weights = torch.zeros(features.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=50)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(features[train_rows] @ weights, target[train_rows])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    logits = (features[test_rows] @ weights.detach()).numpy().astype(np.float32)
    return click_loss(samples.labels[test_rows], logits[:, None])[1]
