"""The online ranker as a parameter of the world."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from solaris_udf.world.draws import Bool, Float64, Int64
from solaris_udf.world.items import Items


@dataclass(frozen=True)
class Candidates:
    """What a ranker is asked: r requests of different users, each with up to w items.

    A ranker sees what an online one may: ids, time, surface, the user's last clicks, how often the pair was shown, and
    the items' public columns through `items` (category, advertiser, bid, start, features). Not the truth.
    """

    user_id: Int64  # [r]
    item_id: Int64  # [r, w]
    valid: Bool  # [r, w]; where false there is no item, and the score is ignored
    event_time: Int64  # [r] microseconds UTC
    surface: Int64  # [r] place in SURFACES
    last_categories: Int64  # [r, 3] of the last clicks, newest first, -1 for none
    times_shown: Int64  # [r, w] of the pair in the last 24 h
    noisy_score: Float64  # [r, w] what the default ranker says
    items: Items
    item: Int64  # [r, w] numbers, to index `items`


Ranker = Callable[[Candidates], Float64]
"""Candidates -> scores [r, w], no NaN where valid; the highest are shown. Equal candidates must get equal scores."""


def noisy_ranker(candidates: Candidates) -> Float64:
    """The default: the log of the bid, plus a noisy estimate of the click that knows quality and linear taste."""
    return candidates.noisy_score


def rank(scores: Float64, valid: Bool) -> Int64:
    """Places [r, w] in the order of the scores, 0 first; equal scores keep their order, invalid ones come last.

    Raises ValueError for scores of another shape, or a NaN where an item is.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if scores.shape != valid.shape:
        raise ValueError(f"the ranker's scores are {scores.shape}, must be {valid.shape}")
    if np.isnan(scores[valid]).any():
        raise ValueError("the ranker gave a NaN score")
    order = np.argsort(np.where(valid, -scores, np.inf), axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), axis=1)
    return places
