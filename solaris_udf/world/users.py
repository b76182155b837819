"""What a user is from birth: cluster, activity, time zone, habits, biases."""

from dataclasses import dataclass

import numpy as np

from solaris_udf.world.draws import Float64, Int64, fold, key, normal, uniform
from solaris_udf.world.parameters import DIM, HOUR, WorldParameters

# Where users live (hours from UTC) and how many: half-hour zones included.
_ZONES = (
    (-8.0, 0.1),
    (-5.0, 0.2),
    (-3.0, 0.1),
    (0.0, 0.1),
    (1.0, 0.2),
    (3.0, 0.05),
    (5.5, 0.15),
    (8.0, 0.05),
    (9.0, 0.05),
)
# Requests by hour of the local day, mean 1: quiet at night, a bump at noon, the peak in the evening.
_PROFILE = np.array([5, 3, 2, 1, 1, 2, 4, 7, 9, 9, 9, 11, 13, 12, 10, 10, 11, 13, 15, 18, 20, 19, 15, 9], dtype=float)
_PROFILE /= _PROFILE.mean()
MAX_PER_DAY = 2_000.0


@dataclass(frozen=True)
class Users:
    """A chunk of users. Arrays [n], but centre [DIM, n] and surface_limits [n, 2]."""

    number: Int64
    cluster: Int64
    centre: Float64
    per_hour: Float64
    zone: Float64
    bias: Float64
    conversion_bias: Float64
    surface_limits: Float64

    def request_rate(self, time: int) -> Float64:
        """Expected requests [n] in the hour that begins at a time (microseconds UTC)."""
        local = np.floor(time / HOUR + self.zone).astype(np.int64) % 24
        out: Float64 = self.per_hour * _PROFILE[local]
        return out


def cluster_centres(parameters: WorldParameters) -> Float64:
    """[clusters, DIM]."""
    clusters = np.arange(parameters.rules.taste_clusters)
    return normal(fold(fold(key(parameters.seed, "clusters"), clusters)[:, None], np.arange(DIM)))


def make_users(parameters: WorldParameters, numbers: Int64) -> Users:
    """The users of those numbers [n], which may be any part of the world's. Raises ValueError for a number outside."""
    numbers = np.ascontiguousarray(numbers, dtype=np.int64)
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < parameters.users):
        raise ValueError(f"user numbers must be from 0 to {parameters.users - 1}")
    rules = parameters.rules
    own = fold(key(parameters.seed, "users"), numbers)
    cluster = (uniform(fold(own, 0)) * rules.taste_clusters).astype(np.int64)
    activity = np.exp(rules.activity_sigma * normal(fold(own, 1)) - rules.activity_sigma**2 / 2)
    offsets = np.array([zone for zone, _ in _ZONES])
    limits = np.cumsum([share for _, share in _ZONES])[:-1]
    # Early birds and night owls: habits are shifted against the zone.
    zone = offsets[np.searchsorted(limits, uniform(fold(own, 2)), side="right")] + 2.0 * normal(fold(own, 3))
    shares = np.array(rules.surface_shares) * np.exp(0.8 * normal(fold(own[:, None], np.arange(10, 13))))
    first, second, third = shares.T
    total = first + second + third
    return Users(
        number=numbers,
        cluster=cluster,
        centre=np.ascontiguousarray(cluster_centres(parameters)[cluster].T),
        per_hour=np.minimum(rules.requests_per_day * activity, MAX_PER_DAY) / 24.0,
        zone=zone,
        bias=rules.user_bias_sd * normal(fold(own, 4)),
        conversion_bias=rules.user_bias_sd * normal(fold(own, 5)),
        surface_limits=np.stack([first / total, (first + second) / total], axis=1),
    )
