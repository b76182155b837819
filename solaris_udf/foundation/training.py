"""Trains the reference foundation model on local samples. One process, or one of several that average gradients."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from solaris_udf.foundation.contract import Description
from solaris_udf.foundation.export import export_split_model
from solaris_udf.foundation.items import Int64
from solaris_udf.foundation.losses import baseline_ne, click_loss, split_by_time, task_loss
from solaris_udf.foundation.projection import ProjectedHead, Projection
from solaris_udf.foundation.reference import INPUTS, SIZES, ReferenceModel
from solaris_udf.foundation.samples import Batch, Samples, batches_of

log = logging.getLogger("solaris")

HEADS = ("click", "conversion")
Progress = Callable[[Iterable[Any], int, str], Iterator[Any]]


@dataclass(frozen=True)
class Plan:
    """How to train.

    batch: entries (a user at a time) a step, each with all its rows. id_dropout: share of user ids dropped in training.
    validation: share of the rows, the latest, that early stopping looks at. patience: epochs without improvement.
    """

    size: str = "demo"
    embedding_dim: int = 32
    epochs: int = 3
    projection_epochs: int = 2
    batch: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    id_dropout: float = 0.5
    validation: float = 0.1
    patience: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """What training gave. ne: normalized entropy (log loss / entropy of their rate) of the validation rows' clicks."""

    description: Description
    epochs: int
    best_epoch: int
    train_rows: int
    validation_rows: int
    log_loss: float
    ne: float
    baseline_ne: float
    reconstruction: float


def silent(steps: Iterable[Any], total: int, label: str) -> Iterator[Any]:
    """A Progress that shows nothing."""
    yield from steps


def train(
    samples: Samples,
    plan: Plan,
    folder: Path,
    *,
    name: str,
    device: str = "cpu",
    progress: Progress = silent,
    rank: int = 0,
    workers: int = 1,
) -> Trained | None:
    """Trains, projects and exports to folder; returns what came of it (None on ranks other than 0).

    After each epoch the state goes to folder/checkpoint; a run that was killed resumes from there and ends with the
    same model as one that was not. With workers > 1, torch.distributed must be initialized; each rank takes every
    workers-th batch. Raises ValueError if there are no rows to train on.
    """
    inputs = tuple(feature for feature in INPUTS if feature != "item_dense" or samples.items.dense_width)
    names = (
        tuple(key for key in inputs if not key.startswith("item_")),
        tuple(key for key in inputs if key.startswith("item_")),
    )
    tasks = samples.labels.shape[1]
    training, validation = split_by_time(samples, plan.validation)
    if not len(training):
        raise ValueError("there are no shown rows to train on")
    torch.manual_seed(plan.seed)
    model = ReferenceModel(SIZES[plan.size], tasks, samples.items.dense_width, plan.id_dropout).to(device)
    trainer = _Trainer(model, samples, plan, names, device, folder / "checkpoint", progress, rank, workers)
    trainer.start_at_base_rates(training)
    trainer.fit(training, validation)
    projection = trainer.project(training)
    if rank:
        return None
    model.eval()
    loss, ne = click_loss(*trainer.predict(validation))
    baseline = baseline_ne(samples, training, validation)
    error = trainer.reconstruction(projection, validation)
    description = export_split_model(
        model.encoder,
        ProjectedHead(model.head, projection),
        folder,
        name=name,
        inputs=inputs,
        heads=HEADS[:tasks],
        dense=samples.items.dense_width,
        lengths={"clicked": SIZES[plan.size].clicked_length, "shown": SIZES[plan.size].shown_length},
    )
    trainer.clear()
    sizes = [int(np.isin(samples.state, states).sum()) for states in (training, validation)]
    return Trained(description, trainer.epoch, trainer.best_epoch, sizes[0], sizes[1], loss, ne, baseline, error)


@dataclass
class _Trainer:
    model: ReferenceModel
    samples: Samples
    plan: Plan
    names: tuple[tuple[str, ...], tuple[str, ...]]
    device: str
    checkpoint: Path
    progress: Progress
    rank: int
    workers: int
    epoch: int = 0
    best_epoch: int = 0

    def start_at_base_rates(self, training: Int64) -> None:
        """Sets the logits' biases to the labels' rates, so that no step is spent on learning those."""
        labels = self.samples.labels[np.isin(self.samples.state, training)]
        known = np.maximum((~np.isnan(labels)).sum(axis=0), 1)
        rate = np.clip(np.nansum(labels, axis=0) / known, 1e-4, 1 - 1e-4)
        with torch.no_grad():
            self.model.head.logits.bias.copy_(torch.from_numpy(np.log(rate / (1 - rate))))

    def fit(self, training: Int64, validation: Int64) -> None:
        """Epochs until the validation loss stops falling; the model keeps the best epoch's weights."""
        plan = self.plan
        optimizer = torch.optim.AdamW(
            self.model.parameters(), plan.learning_rate, weight_decay=plan.weight_decay, fused=True
        )
        steps = -(-len(training) // plan.batch) // self.workers
        total = max(1, steps * plan.epochs)
        losses, best = self._resume(optimizer)
        while self.epoch < plan.epochs and self.epoch - self.best_epoch < plan.patience:
            self.model.train()
            seed = plan.seed * 1000 + self.epoch
            torch.manual_seed(seed * self.workers + self.rank)
            batches = self._batches(training, seed)
            for step, states in enumerate(self.progress(batches, steps, f"epoch {self.epoch + 1}")):
                done = (self.epoch * steps + step) / total
                # Linear warm-up over 5% of all steps, then down to zero as a cosine.
                rate = min(done / 0.05 + 0.02, 0.5 + 0.5 * float(np.cos(np.pi * done)))
                for group in optimizer.param_groups:
                    group["lr"] = plan.learning_rate * rate
                batch = self._batch(states)
                with self._autocast():
                    loss = task_loss(self._forward(batch)[1].float(), self._tensor(batch.labels))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self._average_gradients()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
            self.epoch += 1
            # Without validation rows every epoch counts as an improvement.
            losses.append(click_loss(*self.predict(validation))[0] if len(validation) else -float(self.epoch))
            if losses[-1] <= min(losses):
                self.best_epoch, best = self.epoch, _state_of(self.model)
            log.info("epoch %s: validation log loss %.5f", self.epoch, losses[-1])
            if self.rank == 0:
                self._save(optimizer, losses, best)
        self.model.load_state_dict(best)

    def project(self, training: Int64) -> Projection:
        """The projection, trained on the frozen model's outputs for a part of the training rows."""
        plan = self.plan
        torch.manual_seed(plan.seed + 1)
        random = np.random.default_rng(plan.seed)
        states = np.sort(random.permutation(training)[:20_000])
        hidden, logits = self._outputs(states)
        projection = Projection(hidden.shape[1], logits.shape[1], plan.embedding_dim).to(self.device)
        projection.fit_scales(hidden, logits)
        optimizer = torch.optim.AdamW(projection.parameters(), 2e-3, weight_decay=0.0)
        total = plan.projection_epochs * -(-len(hidden) // 512)
        step = 0
        for _ in range(plan.projection_epochs):
            for rows in torch.split(torch.from_numpy(random.permutation(len(hidden))), 512):
                optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / total)
                loss = projection.loss(hidden[rows], logits[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                step += 1
        return projection.eval()

    def reconstruction(self, projection: Projection, states: Int64) -> float:
        """Mean squared error of the autoencoder on these entries, in standard deviations; NaN for none."""
        if not len(states):
            return float("nan")
        with torch.no_grad():
            return float(projection.loss(*self._outputs(states)))

    def predict(self, states: Int64) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Labels and logits of all rows of these entries."""
        self.model.eval()
        labels, logits = [], []
        with torch.inference_mode():
            for part in self._in_order(states):
                batch = self._batch(part)
                labels.append(batch.labels)
                logits.append(self._forward(batch)[1].float().cpu().numpy())
        tasks = self.samples.labels.shape[1]
        empty = np.zeros((0, tasks), dtype=np.float32)
        return np.concatenate([empty, *labels]), np.concatenate([empty, *logits])

    def clear(self) -> None:
        """Removes the checkpoint; the exported model stands in its place."""
        for file in self.checkpoint.glob("*"):
            file.unlink()
        if self.checkpoint.exists():
            self.checkpoint.rmdir()

    def _outputs(self, states: Int64) -> tuple[Tensor, Tensor]:
        self.model.eval()
        found = []
        with torch.no_grad():
            for part in self._in_order(states):
                found.append(self._forward(self._batch(part)))
        return torch.cat([hidden.float() for hidden, _ in found]), torch.cat([logits.float() for _, logits in found])

    def _in_order(self, states: Int64) -> list[Int64]:
        size = max(1024, self.plan.batch)
        order = states[np.argsort(self._lengths(states), kind="stable")]
        return [np.sort(order[start : start + size]) for start in range(0, len(order), size)]

    def _lengths(self, states: Int64) -> Int64:
        return self.samples.users.longest()[states]

    def _batches(self, training: Int64, seed: int) -> list[Int64]:
        """This rank's batches; every rank gets the same number, so that none waits for another forever."""
        batches = list(batches_of(self._lengths(training), training, self.plan.batch, seed))
        if self.workers == 1:
            return batches
        return batches[self.rank : len(batches) // self.workers * self.workers : self.workers]

    def _batch(self, states: Int64) -> Batch:
        return self.samples.batch(states, *self.names)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        users = {name: self._tensor(values) for name, values in batch.users.items()}
        items = {name: self._tensor(values) for name, values in batch.items.items()}
        pair, logits = self.model(users, self._tensor(batch.index), items)
        return pair, logits

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.device.startswith("cuda"))

    def _average_gradients(self) -> None:
        if self.workers > 1:
            for parameter in self.model.parameters():
                # A parameter that this rank's batch did not use still takes part, or the ranks would wait in vain.
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.workers

    def _fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be resumed."""
        sums = [int(self.samples.item_id.sum()), int(self.samples.users.at.sum())]
        return {
            "plan": asdict(self.plan),
            "rows": len(self.samples),
            "sums": sums,
            "workers": self.workers,
            "clicks": float(np.nansum(self.samples.labels)),
        }

    def _save(self, optimizer: torch.optim.Optimizer, losses: list[float], best: dict[str, Tensor]) -> None:
        tensors = {f"model.{key}": value for key, value in _state_of(self.model).items()}
        tensors |= {f"best.{key}": value for key, value in best.items()}
        for place, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{place}.{key}": value.contiguous() for key, value in state.items()}
        state_text = json.dumps(
            {"epoch": self.epoch, "best_epoch": self.best_epoch, "losses": losses, "fingerprint": self._fingerprint()}
        )
        self.checkpoint.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint / ".partial"
        save_file({key: value.clone() for key, value in tensors.items()}, partial, metadata={"state": state_text})
        partial.replace(self.checkpoint / "checkpoint.safetensors")

    def _resume(self, optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, Tensor]]:
        """Losses so far and the best weights; from the checkpoint if there is one of this very training."""
        from safetensors import safe_open

        file = self.checkpoint / "checkpoint.safetensors"
        if not file.exists():
            return [], _state_of(self.model)
        with safe_open(file, "pt") as opened:
            state = json.loads(opened.metadata()["state"])
        if state["fingerprint"] != json.loads(json.dumps(self._fingerprint())):
            log.info("the checkpoint in %s is of another training, starting anew", self.checkpoint)
            return [], _state_of(self.model)
        tensors = load_file(file, device=self.device)

        def under(prefix: str) -> dict[str, Tensor]:
            return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

        self.model.load_state_dict(under("model."))
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in under("optimizer.").items():
            place, _, what = key.partition(".")
            moments.setdefault(int(place), {})[what] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
        self.epoch, self.best_epoch = state["epoch"], state["best_epoch"]
        log.info("resuming after epoch %s", self.epoch)
        return state["losses"], under("best.")


def _state_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of the weights. Shared modules stand under each of their names."""
    return {key: value.detach().clone() for key, value in model.state_dict().items()}
