"""Campaigns. A world has `items` places; in each, one campaign follows another, so as many run at any time."""

from dataclasses import dataclass

import numpy as np

from solaris_udf.world.draws import Float64, Int64, fold, key, normal, uniform
from solaris_udf.world.parameters import DIM, HOUR, WorldParameters

DENSE = 8  # length of an item's dense features
_DAY = 24 * HOUR


@dataclass(frozen=True)
class Items:
    """Campaigns by number; campaign g of place p has the number g * places + p, whatever the horizon.

    Some campaigns of the last generations start after the horizon. Vectors are [DIM, n] float32; times microseconds.
    """

    places: int
    horizon: int
    start: Int64
    end: Int64
    category: Int64
    advertiser: Int64
    popularity: Float64
    pace: Float64
    quality: Float64
    conversion_quality: Float64
    bid: Float64
    pays_for_conversions: np.ndarray
    vector: np.ndarray
    features: np.ndarray  # [n, DENSE] float32: a noisy, partial view of the vector

    def running(self, time: int) -> Int64:
        """The campaign [places] that runs in each place at a time from the world's start to the horizon."""
        ended = (self.end.reshape(-1, self.places) <= time).sum(axis=0)
        out: Int64 = ended * self.places + np.arange(self.places)
        return out

    def weights(self, running: Int64, time: int) -> Float64:
        """How much each campaign [n] is delivered at a time: its popularity and its pace."""
        done = (time - self.start[running]) / (self.end[running] - self.start[running])
        out: Float64 = self.popularity[running] * np.exp(self.pace[running] * (2.0 * done - 1.0))
        return out


def make_items(parameters: WorldParameters, horizon: int) -> Items:
    """All campaigns that start before the horizon (microseconds), and some later ones."""
    rules, places = parameters.rules, parameters.items
    root = key(parameters.seed, "items")
    starts: list[Int64] = []
    ends: list[Int64] = []
    start = np.full(places, parameters.start, dtype=np.int64)
    while not ends or ends[-1].min() <= horizon:
        generation = len(ends)
        own = fold(root, generation * places + np.arange(places))
        days = np.clip(rules.life_median_days * np.exp(rules.life_sigma * normal(fold(own, 0))), 1.0, 60.0)
        life = (days * _DAY).astype(np.int64)
        if generation == 0:  # those that run at the start are somewhere within their lives
            start = start - (life * uniform(fold(own, 1)) * 0.999).astype(np.int64)
        starts.append(start)
        ends.append(start + life)
        start = ends[-1]
    count = len(ends) * places
    own = fold(root, np.arange(count))
    categories = rules.categories
    category = np.minimum((uniform(fold(own, 2)) ** 1.5 * categories).astype(np.int64), categories - 1)
    centre = normal(fold(fold(key(parameters.seed, "categories"), np.arange(categories))[:, None], np.arange(DIM)))
    noise = normal(fold(own[:, None], np.arange(100, 100 + DIM)))
    vector = np.sqrt(0.5) * centre[category] + np.sqrt(0.5) * noise
    mixing = normal(fold(fold(key(parameters.seed, "dense"), np.arange(DENSE))[:, None], np.arange(DIM))) / np.sqrt(DIM)
    features = 0.3 * normal(fold(own[:, None], np.arange(200, 200 + DENSE)))
    for dim in range(DIM):  # not a matrix product, whose rounding depends on how many rows there are
        features += vector[:, dim, None] * mixing[:, dim]
    advertisers = max(1, places // rules.items_per_advertiser)
    return Items(
        places=places,
        horizon=horizon,
        start=np.concatenate(starts),
        end=np.concatenate(ends),
        category=category,
        advertiser=(uniform(fold(own, 3)) * advertisers).astype(np.int64),
        popularity=(uniform(fold(own, 4)) * places + 1.0) ** -rules.zipf,
        pace=rules.pace_sd * normal(fold(own, 5)),
        quality=rules.quality_sd * normal(fold(own, 6)),
        conversion_quality=rules.quality_sd * normal(fold(own, 7)),
        bid=np.exp(rules.bid_sigma * normal(fold(own, 8))),
        pays_for_conversions=uniform(fold(own, 9)) < 0.5,
        vector=np.ascontiguousarray(vector.T.astype(np.float32)),
        features=features.astype(np.float32),
    )
