"""A small click model of the kind that ranks online: hashed ids, cheap counters, and SOLARIS embeddings as extra input.

Deep & Cross (Wang et al., 2021) over field embeddings. A pair's vector and the user-level vector have slots of their
own, and the user-level vector meets the item's embedding in a product: alone it says nothing about the item. Soft
labels of the foundation model go to an auxiliary head (Liang et al., 2025, ExFM). Every feature set is trained on the
same rows in the same order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from solaris_udf.vertical_rows import Rows

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FeatureSet:
    """What a model may see beside the base features."""

    pair: bool = False
    user: bool = False
    flags: bool = False
    soft_labels: bool = False
    shuffled: bool = False

    @property
    def served(self) -> bool:
        """Whether it reads anything that a snapshot serves."""
        return self.pair or self.user or self.flags


FEATURE_SETS: dict[str, FeatureSet] = {
    "base": FeatureSet(),
    "distillation": FeatureSet(soft_labels=True),
    "embeddings": FeatureSet(pair=True, user=True, flags=True),
    "both": FeatureSet(pair=True, user=True, flags=True, soft_labels=True),
    # Controls: what is served goes to a random other row; only whether and how old, without the vectors.
    "shuffled": FeatureSet(pair=True, user=True, flags=True, shuffled=True),
    "flags_only": FeatureSet(flags=True),
    # Which slot the gain comes from.
    "pair_only": FeatureSet(pair=True, flags=True),
    "user_only": FeatureSet(user=True, flags=True),
}


@dataclass(frozen=True)
class Schedule:
    """How a model is trained; the same for every feature set of a comparison."""

    epochs: int = 4
    batch: int = 512
    learning_rate: float = 2e-3
    weight_decay: float = 1e-5
    buckets: int = 1 << 13
    id_dim: int = 8
    slot_dim: int = 24
    hidden: tuple[int, int] = (64, 32)
    user_dropout: float = 0.3
    soft_weight: float = 1.0
    validation_share: float = 0.15

    @property
    def field_sizes(self) -> tuple[int, ...]:
        """Buckets of each of ID_FIELDS: users and items have many ids, surfaces and hours few."""
        return (self.buckets, self.buckets, self.buckets // 4, self.buckets // 4, 64, 32)


class _Cross(nn.Module):
    """x0 * (W x + b) + x: one more degree of feature crossing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        crossed: torch.Tensor = first * self.linear(x) + x
        return crossed


class _Network(nn.Module):
    def __init__(self, numbers: int, flags: int, dim: int, features: FeatureSet, plan: Schedule) -> None:
        super().__init__()
        self.features = features
        self.user_dropout = plan.user_dropout
        sizes = torch.tensor(plan.field_sizes)
        self.ids = nn.Embedding(int(sizes.sum()), plan.id_dim)
        nn.init.normal_(self.ids.weight, std=0.01)
        self.register_buffer("offsets", sizes.cumsum(0) - sizes, persistent=False)
        width = len(sizes) * plan.id_dim + numbers
        if features.flags:
            width += flags
        if features.pair:
            self.pair = nn.Linear(dim, plan.slot_dim)
            width += plan.slot_dim
        if features.user:
            self.user = nn.Linear(dim, plan.slot_dim)
            self.item = nn.Embedding(plan.buckets, plan.slot_dim)
            nn.init.normal_(self.item.weight, std=0.05)
            width += 2 * plan.slot_dim
        self.crosses = nn.ModuleList([_Cross(width), _Cross(width)])
        self.deep = nn.Sequential(
            nn.Linear(width, plan.hidden[0]), nn.ReLU(), nn.Linear(plan.hidden[0], plan.hidden[1]), nn.ReLU()
        )
        self.head = nn.Linear(width + plan.hidden[1], 1)
        self.soft_head = nn.Linear(plan.hidden[1], 1) if features.soft_labels else None

    def forward(
        self, ids: torch.Tensor, numbers: torch.Tensor, flags: torch.Tensor, pair: torch.Tensor, user: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.training and self.user_dropout:
            # A user's id is hidden now and then, or the model learns users by heart and fails on later time.
            keep = torch.rand(len(ids)) >= self.user_dropout
            ids = torch.cat([(ids[:, :1] * keep[:, None]), ids[:, 1:]], dim=1)
        parts = [self.ids(ids + self.get_buffer("offsets")).flatten(1), numbers]
        if self.features.flags:
            parts.append(flags)
        if self.features.pair:
            parts.append(self.pair(pair))
        if self.features.user:
            level = self.user(user)
            parts += [level, level * self.item(ids[:, 1])]
        first = torch.cat(parts, dim=1)
        x = first
        for cross in self.crosses:
            x = cross(first, x)
        deep = self.deep(first)
        logit = self.head(torch.cat([x, deep], dim=1)).squeeze(1)
        return logit, self.soft_head(deep).squeeze(1) if self.soft_head is not None else None


@dataclass(frozen=True)
class _Scaling:
    """Training means and deviations; vectors are scaled over the rows that have one, absent ones are zero."""

    numbers: tuple[Float32, Float32]
    pair: tuple[Float32, Float32]
    user: tuple[Float32, Float32]

    @classmethod
    def fit(cls, rows: Rows) -> "_Scaling":
        return cls(_moments(rows.numbers), _moments(rows.pair[rows.has_pair]), _moments(rows.user[rows.has_user]))


@dataclass(frozen=True)
class VerticalModel:
    """A trained model. predict gives click probabilities."""

    features: FeatureSet
    network: _Network
    scaling: _Scaling
    field_sizes: tuple[int, ...]
    seed: int
    epochs: int

    def predict(self, rows: Rows, batch: int = 8192) -> Float64:
        """P(click), [n], of rows with the widths that it was trained on."""
        tensors = _tensors(self._view(rows), self.scaling, self.field_sizes)
        self.network.eval()
        with torch.no_grad(), _one_thread():
            parts = [
                torch.sigmoid(self.network(*(tensor[at : at + batch] for tensor in tensors))[0])
                for at in range(0, len(rows), batch)
            ]
        return torch.cat(parts).double().numpy() if parts else np.zeros(0)

    def _view(self, rows: Rows) -> Rows:
        return rows.shuffled(self.seed + 1) if self.features.shuffled else rows


def train(
    rows: Rows,
    features: FeatureSet,
    *,
    seed: int,
    schedule: Schedule | None = None,
    progress: Callable[[], None] = lambda: None,
) -> VerticalModel:
    """Trains on rows in time order; the last validation_share of them choose the epoch that is kept.

    progress is called once an epoch. Raises ValueError without rows of both classes in the part that trains.
    """
    plan = schedule or Schedule()
    cut = len(rows) - int(len(rows) * plan.validation_share)
    if cut < 2 or not 0 < rows.label[:cut].sum() < cut:
        raise ValueError(f"{len(rows)} rows to train on, not both clicked and not clicked")
    scaling = _Scaling.fit(rows.take(slice(0, cut)))
    view = rows.shuffled(seed) if features.shuffled else rows
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        network = _Network(rows.numbers.shape[1], rows.flags.shape[1], rows.pair.shape[1], features, plan)
        base = float(rows.label[:cut].mean())
        nn.init.constant_(network.head.bias, float(np.log(base / (1 - base))))
        model = VerticalModel(features, network, scaling, plan.field_sizes, seed, 0)
        tensors = _tensors(view, scaling, plan.field_sizes)
        label = torch.from_numpy(rows.label)
        soft = torch.from_numpy(np.nan_to_num(rows.soft, nan=-1.0))
        optimizer = torch.optim.Adam(
            network.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay, fused=True
        )
        order = np.random.default_rng(seed)
        best, kept, kept_epoch = float("inf"), network.state_dict(), 0
        for epoch in range(1, plan.epochs + 1):
            network.train()
            for index in np.array_split(order.permutation(cut), max(1, cut // plan.batch)):
                at = torch.from_numpy(index)
                logit, soft_logit = network(*(tensor[at] for tensor in tensors))
                loss = nn.functional.binary_cross_entropy_with_logits(logit, label[at])
                if soft_logit is not None:
                    loss = loss + plan.soft_weight * _soft_loss(soft_logit, soft[at])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            progress()
            if cut < len(rows):
                found = _validation_loss(network, tensors, label, cut)
                if found >= best:
                    continue
                best = found
            kept_epoch = epoch
            kept = {name: value.clone() for name, value in network.state_dict().items()}
        network.load_state_dict(kept)
    return replace(model, epochs=kept_epoch)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The model is so small that threads cost more than they bring, above all where CPUs are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _soft_loss(logit: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
    known = soft >= 0
    if not known.any():
        return logit.sum() * 0.0
    return nn.functional.binary_cross_entropy_with_logits(logit[known], soft[known])


def _validation_loss(network: _Network, tensors: tuple[torch.Tensor, ...], label: torch.Tensor, cut: int) -> float:
    """Log loss of the rows from cut on."""
    network.eval()
    with torch.no_grad():
        logit, _ = network(*(tensor[cut:] for tensor in tensors))
        return float(nn.functional.binary_cross_entropy_with_logits(logit, label[cut:]))


def _moments(values: Float32) -> tuple[Float32, Float32]:
    if not len(values):
        return np.zeros(values.shape[1], np.float32), np.ones(values.shape[1], np.float32)
    deviation = values.std(axis=0)
    return values.mean(axis=0), np.where(deviation > 1e-6, deviation, 1.0).astype(np.float32)


def _tensors(rows: Rows, scaling: _Scaling, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    def scaled(values: Float32, moments: tuple[Float32, Float32], present: npt.NDArray[np.bool_]) -> torch.Tensor:
        result = (values - moments[0]) / moments[1]
        result[~present] = 0.0
        return torch.from_numpy(result)

    everywhere = np.ones(len(rows), dtype=np.bool_)
    return (
        torch.from_numpy(rows.buckets(sizes)),
        scaled(rows.numbers, scaling.numbers, everywhere),
        torch.from_numpy(rows.flags),
        scaled(rows.pair, scaling.pair, rows.has_pair),
        scaled(rows.user, scaling.user, rows.has_user),
    )
