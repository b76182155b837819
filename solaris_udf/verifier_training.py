"""Training of the verifier, on one machine and with a bounded number of examples."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from solaris_udf.calibration import Float64, fit_isotonic
from solaris_udf.verifier import Verifier, prepare


@dataclass(frozen=True)
class Training:
    """How to train. hidden: sizes of the hidden layers; () is logistic regression."""

    hidden: tuple[int, ...] = (64, 32)
    epochs: int = 30
    patience: int = 4
    batch_size: int = 2048
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    seed: int = 7
    threads: int = 1


def train(
    values: npt.NDArray[np.float64],
    rows: npt.NDArray[np.float64],
    validation: npt.NDArray[np.bool_],
    features: Sequence[str],
    window_hours: float,
    training: Training,
) -> Verifier:
    """Fits both outputs and calibrates them.

    values: features [n, f]; rows: scored rows of each pair in its window [n]; validation: which examples are of the
    later time that stops the training and calibrates, bool [n]. The loss is the log loss of "at least one row" plus
    the Poisson loss of the rows, where expected rows = probability * (1 + further rows), so they never fall below the
    probability.

    Raises ValueError if either part is empty or holds one class only.
    """
    import torch

    label = rows > 0
    for name, part in (("training", ~validation), ("validation", validation)):
        if not part.any() or label[part].all() or not label[part].any():
            raise ValueError(
                f"the {name} examples ({int(part.sum())}) need pairs that were scored and pairs that were not"
            )
    started = time.monotonic()
    prepared = prepare(values)
    mean = prepared[~validation].mean(axis=0)
    scale = np.maximum(prepared[~validation].std(axis=0), 1e-3)
    scaled = torch.from_numpy(((prepared - mean) / scale).astype(np.float32))
    counts = torch.from_numpy(rows.astype(np.float32))
    inside = torch.from_numpy(np.flatnonzero(~validation))
    outside = torch.from_numpy(np.flatnonzero(validation))

    threads = torch.get_num_threads()
    torch.set_num_threads(training.threads)
    try:
        generator = torch.Generator().manual_seed(training.seed)
        net = _network(len(features), training.hidden, float(label[~validation].mean()), generator)
        optimizer = torch.optim.AdamW(net.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
        best, best_loss, waited, epochs = [part.detach().clone() for part in net.parameters()], float("inf"), 0, 0
        for epoch in range(training.epochs):
            epochs = epoch + 1
            shuffled = inside[torch.randperm(len(inside), generator=generator)]
            for start in range(0, len(shuffled), training.batch_size):
                batch = shuffled[start : start + training.batch_size]
                loss = _loss(net(scaled[batch]), counts[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                now = float(_loss(net(scaled[outside]), counts[outside]))
            if now < best_loss - 1e-5:
                best, best_loss, waited = [part.detach().clone() for part in net.parameters()], now, 0
            else:
                waited += 1
                if waited >= training.patience:
                    break
    finally:
        torch.set_num_threads(threads)
    layers = tuple(
        (best[place].numpy().astype(np.float64), best[place + 1].numpy().astype(np.float64))
        for place in range(0, len(best), 2)
    )
    plain = Verifier(tuple(features), window_hours, mean, scale, layers)
    return _calibrate(
        plain,
        values[validation],
        rows[validation],
        {
            "epochs": float(epochs),
            "validation_loss": best_loss,
            "examples": float((~validation).sum()),
            "validation_examples": float(validation.sum()),
            "train_seconds": time.monotonic() - started,
        },
    )


def _network(inputs: int, hidden: tuple[int, ...], base_rate: float, generator: Any) -> Any:
    import torch

    sizes = (inputs, *hidden)
    parts: list[torch.nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        parts += [torch.nn.Linear(wide, narrow), torch.nn.ReLU()]
    parts.append(torch.nn.Linear(sizes[-1], 2))
    net = torch.nn.Sequential(*parts)
    with torch.no_grad():
        for module in net:
            if isinstance(module, torch.nn.Linear):
                bound = (6 / module.in_features) ** 0.5
                module.weight.uniform_(-bound, bound, generator=generator)
                module.bias.zero_()
        last = parts[-1]
        assert isinstance(last, torch.nn.Linear)
        last.weight.mul_(0.1)
        # Start at the base rate, so that the first steps are not spent on finding it.
        last.bias[0] = float(np.log(base_rate / (1 - base_rate)))
        last.bias[1] = -1.0
    return net


def _loss(output: Any, counts: Any) -> Any:
    import torch

    logit, further = output[:, 0], torch.nn.functional.softplus(output[:, 1])
    happened = (counts > 0).float()
    expected = torch.sigmoid(logit) * (1 + further)
    poisson = (expected - counts * torch.log(expected + 1e-9)).mean()
    return torch.nn.functional.binary_cross_entropy_with_logits(logit, happened) + poisson


def _calibrate(verifier: Verifier, values: Float64, rows: Float64, metrics: dict[str, float]) -> Verifier:
    """Isotonic for the probability; then one factor on the further rows so that the expected rows sum to the real
    ones.
    """
    raw, further = verifier.raw(values)
    label = (rows > 0).astype(np.float64)
    table = fit_isotonic(raw, label)
    probability = table.apply(raw)
    weight = float((probability * further).sum())
    excess = max(0.0, (float(rows.sum()) - float(probability.sum())) / weight) if weight > 0 else 1.0
    clipped = np.clip(probability, 1e-9, 1 - 1e-9)
    loss = -(label * np.log(clipped) + (1 - label) * np.log(1 - clipped)).mean()
    return Verifier(
        verifier.features,
        verifier.window_hours,
        verifier.mean,
        verifier.scale,
        verifier.layers,
        table,
        excess,
        {
            **metrics,
            "log_loss": float(loss),
            "positives": float(label.mean()),
            "captured_at_20": captured(probability * (1 + excess * further), rows, 0.2),
        },
    )


def captured(score: Float64, rows: Float64, share: float) -> float:
    """The part of all rows that the best `share` of the pairs by score holds; 0 for no rows."""
    total = float(rows.sum())
    if total == 0:
        return 0.0
    best = np.argsort(-score, kind="stable")[: round(share * len(score))]
    return float(rows[best].sum()) / total
