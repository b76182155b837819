"""The catalogue of inputs that the pipeline can feed to a foundation model.

A model names the inputs it needs; it gets exactly those, as a dict of tensors. User inputs have one row per user as
they were at a time `at`; item inputs have one row per pair. Sequences run oldest first, hold only events strictly
before `at`, and are right-padded with zeros to the longest of the batch (rounded up), at least one place wide: a user
without events has a mask of all False.

Nulls and unknown items become 0: category 0 and advertiser 0 mean "unknown", an age of 0 hours means "just now or
unknown", dense features of 0 mean "average or unknown".
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

SEQUENCES = ("clicked", "shown")
COUNTS = ("requests", "scored_rows", "shown_rows", "clicked_rows")


class ModelError(ValueError):
    """A model folder, a model's declaration or its output breaks the contract. The message says what and where."""


def one_line(error: BaseException) -> str:
    """Kind and first line of an error, to stand within a message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@dataclass(frozen=True)
class Feature:
    """One input. side: user or item. shape: users, pairs, clicked_length, shown_length and dense name its axes."""

    name: str
    side: str
    dtype: str
    shape: tuple[str | int, ...]
    meaning: str

    @property
    def sequence(self) -> str | None:
        """clicked or shown for a sequence input, None otherwise."""
        return next((name for name in SEQUENCES if f"{name}_length" in self.shape), None)


def _sequence(name: str) -> list[Feature]:
    shape: tuple[str | int, ...] = ("users", f"{name}_length")
    return [
        Feature(f"{name}_item", "user", "int64", shape, f"item ids of the last {name} events"),
        Feature(f"{name}_category", "user", "int64", shape, "their main categories, 0 if unknown"),
        Feature(f"{name}_advertiser", "user", "int64", shape, "their advertisers, 0 if unknown"),
        Feature(f"{name}_age_hours", "user", "float32", shape, "hours from the event to `at`"),
        Feature(f"{name}_mask", "user", "bool", shape, "True where there is an event"),
    ]


FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        *_sequence("clicked"),
        *_sequence("shown"),
        Feature("shown_clicked", "user", "bool", ("users", "shown_length"), "whether the shown event was clicked"),
        Feature("user_id", "user", "int64", ("users",), "the user's id"),
        Feature("user_counts", "user", "float32", ("users", len(COUNTS)), f"log1p of {', '.join(COUNTS)} so far"),
        Feature("item_id", "item", "int64", ("pairs",), "the candidate's id"),
        Feature("item_category", "item", "int64", ("pairs",), "its main category, 0 if unknown"),
        Feature("item_advertiser", "item", "int64", ("pairs",), "its advertiser, 0 if unknown"),
        Feature("item_age_hours", "item", "float32", ("pairs",), "hours from its creation to `at`, 0 if unknown"),
        Feature("item_dense", "item", "float32", ("pairs", "dense"), "its dense features"),
    )
}


def check_names(names: Iterable[str]) -> tuple[Feature, ...]:
    """The features of these names, in catalogue order.

    Raises ModelError that lists every unknown name with the nearest valid one, and for a model without item inputs or
    without user inputs.
    """
    wanted = list(names)
    faults = []
    for name in wanted:
        if name not in FEATURES:
            close = difflib.get_close_matches(name, FEATURES, n=1, cutoff=0.5)
            faults.append(f"unknown input {name!r}" + (f", did you mean {close[0]!r}?" if close else ""))
    if faults:
        raise ModelError("; ".join(faults) + f" (inputs: {', '.join(FEATURES)})")
    found = tuple(feature for feature in FEATURES.values() if feature.name in wanted)
    for side in ("user", "item"):
        if not any(feature.side == side for feature in found):
            raise ModelError(f"the model names no {side} input; a pair embedding needs at least one of each side")
    return found
