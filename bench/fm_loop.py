"""The bar of bench/fm_inference.py: a hand-written loop over the bare PyTorch modules."""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from fm_data import PAIRS_PER_USER, Subject, modules_of
from measure import interleaved

from solaris_udf.foundation.contract import load_description
from solaris_udf.foundation.items import ItemTable
from solaris_udf.foundation.users import item_inputs, padded_length, read_users

GROUPS = (16, 64, 256)  # users a step that the loop tries


@dataclass
class PlainLoop:
    """Runs the modules on a group of users, then on their pairs; all inputs lie ready, users sorted by length."""

    subject: Subject
    users: dict[str, np.ndarray]
    lengths: np.ndarray
    items: dict[str, np.ndarray]
    keys: np.ndarray  # [P, 2], user and item of each row of the result
    group: int = GROUPS[0]

    @classmethod
    def of(cls, subject: Subject, table: pa.Table, items: ItemTable) -> "PlainLoop":
        batch = table.combine_chunks().to_batches()[0]
        users = read_users(batch, subject.description.lengths, items)
        order = np.argsort(users.longest(), kind="stable")
        item_ids = batch["item_ids"].flatten().to_numpy().reshape(len(order), -1)[order].ravel()
        at = np.repeat(users.at[order], PAIRS_PER_USER)
        return cls(
            subject,
            users.inputs(subject.description.names("user"), order, items),
            users.longest()[order],
            item_inputs(subject.description.names("item"), item_ids, items.rows_of(item_ids), at, items),
            np.stack([np.repeat(users.user_id[order], PAIRS_PER_USER), item_ids], axis=1),
        )

    def __call__(self, threads: int = 2) -> np.ndarray:
        """Vectors of all pairs, float16, in the order of keys."""
        torch.set_num_threads(threads)
        found = []
        with torch.inference_mode():
            for start in range(0, len(self.lengths), self.group):
                part = slice(start, min(start + self.group, len(self.lengths)))
                width = padded_length(int(self.lengths[part].max()))
                users = {
                    name: torch.from_numpy(
                        np.ascontiguousarray(values[part, :width] if values.ndim > 1 else values[part])
                    )
                    for name, values in self.users.items()
                }
                state = self.subject.encoder(users)
                pairs = slice(part.start * PAIRS_PER_USER, part.stop * PAIRS_PER_USER)
                index = torch.arange(part.stop - part.start).repeat_interleave(PAIRS_PER_USER)
                items = {name: torch.from_numpy(values[pairs]) for name, values in self.items.items()}
                found.append(self.subject.head(state, index, items)[0].half().numpy())
        return np.concatenate(found)

    def tune(self) -> None:
        """Takes the fastest group size."""
        tasks: dict[str, Callable[[], object]] = {
            str(group): (lambda group=group: (setattr(self, "group", group), self())) for group in GROUPS
        }
        seconds = interleaved(tasks, 1)
        self.group = int(min(seconds, key=lambda name: seconds[name]))


class TwoProcesses:
    """The loop in two processes of one thread, each on every other user; what comes back is that it is done."""

    def __init__(self, subject: Subject, items: Path, parts: list[pa.Table], group: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for part in parts:
            ours, theirs = context.Pipe()
            given = (theirs, subject.folder, part, items, group)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()  # so that the death of the process ends the wait for it
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def __call__(self) -> None:
        for pipe in self._pipes:
            pipe.send(True)
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(False)
            process.join()


def _serve(pipe, folder, part, items, group) -> None:  # type: ignore[no-untyped-def]
    description = load_description(folder)
    subject = Subject(*modules_of(description.name), folder, description)
    loop = PlainLoop.of(subject, part, ItemTable.open(items))
    loop.group = group
    pipe.send(None)
    while pipe.recv():
        loop(threads=1)
        pipe.send(None)
