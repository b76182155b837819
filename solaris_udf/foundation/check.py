"""`solaris model check`: whether a model folder keeps its promises, before a job relies on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from solaris_udf.foundation.contract import load_description
from solaris_udf.foundation.features import ModelError, one_line
from solaris_udf.foundation.model import Inputs, Model, load_model
from solaris_udf.foundation.trial import trial_items, trial_users
from solaris_udf.foundation.users import Array

# Padding and other pairs in the batch may change the order of sums, never more than rounding.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Finding:
    """level: ok, warning or error."""

    check: str
    level: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.message or self.level}"


def check_model(path: str | Path, roots: Sequence[str | Path] | None = None) -> list[Finding]:
    """The promises that the model breaks; empty for a good model. See examine_model."""
    return [finding for finding in examine_model(path, roots) if finding.level == "error"]


def examine_model(path: str | Path, roots: Sequence[str | Path] | None = None) -> list[Finding]:
    """Checks hashes and the declaration, loads the programs, and runs trial batches; a finding for each check.

    Never raises for a bad model.
    """
    try:
        description = load_description(path, roots)
    except ModelError as error:
        return [Finding("folder", "error", str(error))]
    count = len(description.files)
    told = f"{description.name}, version {description.version}, {count} files match their hashes"
    findings = [Finding("folder", "ok", told)]
    try:
        model = load_model(path, roots=roots)
    except ModelError as error:
        return [*findings, Finding("programs", "error", str(error))]
    findings.append(Finding("programs", "ok", "no pickled member, plain operators only"))
    if not description.split:
        findings.append(Finding("split", "warning", "unsplit: the user part runs again for each batch of pairs"))
    return findings + check_loaded(model)


def check_loaded(model: Model) -> list[Finding]:
    """The trial batches: shapes, dynamic sizes, finite outputs, repeatable, independent of the rest of the batch."""
    description = model.description
    lengths = {sequence: min(length, 24) for sequence, length in description.lengths.items()}

    def run(users: Inputs, index: Array, items: Inputs) -> tuple[Array, Array]:
        embedding, logits = model.start_pairs(model.encode_users(users), index, items)()
        return embedding, logits

    users = trial_users(description.inputs, 4, lengths, empty=(3,))
    items = trial_items(description.inputs, 12, description.dense)
    index = np.arange(12, dtype=np.int64) % 4
    try:
        embedding, logits = run(users, index, items)
    except Exception as error:
        return [Finding("trial batch", "error", one_line(error))]
    findings = [_shapes(model, embedding, logits, 12)]
    if findings[0].level == "error":
        return findings

    bad = ~np.isfinite(embedding).all(axis=1)
    if (bad & (index == 3)).any() and not (bad & (index != 3)).any():
        findings.append(Finding("finite", "error", "not finite for a user without events (a mask of all False)"))
    else:
        findings.append(_verdict("finite", not bad.any(), f"{bad.sum()} of 12 trial embeddings are not finite"))
    edges = np.array([-(2**63), 2**63 - 1, 0, -1, 2**53 + 1], dtype=np.int64)
    with_edges = {name: np.resize(edges, 12) if values.dtype == np.int64 else values for name, values in items.items()}
    findings.append(
        _try(
            "any id",
            lambda: bool(np.isfinite(run(users, index, with_edges)[0]).all()),
            "not finite for ids at the ends of int64",
        )
    )

    findings.append(
        _verdict(
            "repeatable",
            np.array_equal(embedding, run(users, index, items)[0], equal_nan=True),
            "the same batch gave different embeddings; is dropout still on?",
        )
    )

    def alone() -> bool:
        """Each user alone with one pair: other sizes (1 and 1), and no other user, pair or padding."""
        for pair in range(4):
            user = index[pair]
            its_user = {name: values[user : user + 1] for name, values in users.items()}
            its_item = {name: values[pair : pair + 1] for name, values in items.items()}
            one = run(its_user, np.zeros(1, dtype=np.int64), its_item)
            if not np.allclose(one[0][0], embedding[pair], atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True):
                return False
        return True

    findings.append(_try("batch independence", alone, "an embedding depends on the other users or pairs of its batch"))

    def padded() -> bool:
        wider = {
            name: np.pad(values, [(0, 0), (0, 8)]) if _is_sequence(model, name) else values
            for name, values in users.items()
        }
        return np.allclose(run(wider, index, items)[0], embedding, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)

    findings.append(_try("padding", padded, "an embedding depends on the padding of its sequences; use the mask"))

    def large() -> bool:
        many_users, many_items = (
            trial_users(description.inputs, 33, lengths),
            trial_items(description.inputs, 1000, description.dense),
        )
        return len(run(many_users, np.arange(1000) % 33, many_items)[0]) == 1000

    findings.append(_try("large batch", large, "33 users with 1,000 pairs fail; are its sizes bounded?"))
    return findings


def _is_sequence(model: Model, name: str) -> bool:
    return any(feature.name == name and feature.sequence for feature in model.description.inputs)


def _shapes(model: Model, embedding: Array, logits: Array, pairs: int) -> Finding:
    wanted = {"embedding": (pairs, model.description.embedding_dim), "logits": (pairs, len(model.description.heads))}
    found = {"embedding": embedding.shape, "logits": logits.shape}
    wrong = [
        f"{name} is {list(found[name])}, must be {list(wanted[name])}" for name in wanted if found[name] != wanted[name]
    ]
    return _verdict("shapes", not wrong, "; ".join(wrong))


def _verdict(check: str, good: bool, fault: str) -> Finding:
    return Finding(check, "ok" if good else "error", "" if good else fault)


def _try(check: str, call: Callable[[], bool], fault: str) -> Finding:
    try:
        return _verdict(check, call(), fault)
    except Exception as error:
        return Finding(check, "error", f"{fault} ({one_line(error)})")
