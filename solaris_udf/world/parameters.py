"""What defines a world: its rules, its size, its seed and when it begins."""

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

HOUR = 3_600_000_000  # microseconds
DIM = 16  # dimensions of tastes and items
SURFACES = ("feed", "reels", "stories")
MAX_USERS = 2**33
MAX_DAYS = 36_500


class Size(NamedTuple):
    """A preset."""

    users: int
    items: int
    days: int


SIZES = {"tiny": Size(60, 60, 4), "demo": Size(600, 300, 6)}


@dataclass(frozen=True)
class Rules:
    """The laws of a world. A change to one is a dated decision: a test bed must not be tuned to a result."""

    # Users
    requests_per_day: float = 6.0  # mean over users
    activity_sigma: float = 0.9  # of the log-normal activity rate
    taste_clusters: int = 12
    taste_deviation: float = 0.3  # stationary sd of a taste around its cluster's centre, per dimension
    taste_half_life_hours: float = 72.0  # of the Ornstein-Uhlenbeck drift
    user_bias_sd: float = 0.5
    # Items
    categories: int = 24
    items_per_advertiser: int = 8
    zipf: float = 0.9  # weight of an item = popularity rank ** -zipf
    pace_sd: float = 0.5  # how much earlier or later in its life a campaign spends
    life_median_days: float = 7.0
    life_sigma: float = 0.6
    quality_sd: float = 0.35
    bid_sigma: float = 0.5
    # Requests
    from_campaigns: int = 9
    by_taste: int = 5
    by_popularity: int = 2
    campaign_set: int = 25
    campaign_hours: float = 30.0  # mean time until a place in the campaign set renews
    shortlist: int = 50  # a user's best items by taste, from which `by_taste` are drawn
    shortlist_hours: int = 6  # how often it is made anew
    taste_pool: int = 400  # items that the shortlist is chosen from: the nearest to the cluster's centre
    shown: int = 3
    score_noise: float = 1.0  # sd of the default ranker's noise, in logits
    # Clicks
    intercept: float = -3.9
    taste_weight: float = 0.9
    order_weight: float = 1.8  # of the last clicked categories' effects
    order_mean: float = 0.1  # of the effect of one category's click on another's: whoever clicked, clicks more
    order_sd: float = 0.7
    order_decay: tuple[float, float, float] = (1.0, 0.6, 0.35)  # by recency
    fatigue: float = 0.35  # logits lost each time the pair was shown in the last 24 h
    fatigue_memory: int = 192  # shown items that a user remembers at most
    surface_effects: tuple[float, float, float] = (0.0, -0.3, 0.2)
    surface_shares: tuple[float, float, float] = (0.55, 0.3, 0.15)
    # Conversions, given a click
    conversion_intercept: float = -2.0
    conversion_weight: float = 1.0
    conversion_mean_hours: float = 6.0
    conversion_max_hours: float = 24.0
    # The log
    late_rate: float = 0.02
    late_max_hours: float = 6.0
    duplicate_rate: float = 0.001
    future_rate: float = 0.0001


STANDARD = Rules()
# Weaker and faster moving tastes, fewer repeated pairs, clicks near 2%.
HARD = replace(
    STANDARD,
    taste_weight=0.6,
    taste_deviation=0.5,
    taste_half_life_hours=24.0,
    order_weight=1.5,
    campaign_set=60,
    campaign_hours=15.0,
    shortlist=120,
    intercept=-4.85,
)
RULES = {"standard": STANDARD, "hard": HARD}


@dataclass(frozen=True)
class WorldParameters:
    """A world from its start on; it has no end. `items` run at any one time; users and items are numbered from 0.

    world: a name in RULES. start: microseconds since 1970-01-01 UTC. Raises ValueError for what can't be.
    """

    world: str
    seed: int
    users: int
    items: int
    start: int

    def __post_init__(self) -> None:
        if self.world not in RULES:
            raise ValueError(f"there is no world {self.world!r}; worlds: {', '.join(RULES)}")
        if not 1 <= self.users <= MAX_USERS:
            raise ValueError(f"users must be from 1 to {MAX_USERS}, not {self.users}")
        if self.items < 1:
            raise ValueError(f"items must be at least 1, not {self.items}")

    @property
    def rules(self) -> Rules:
        return RULES[self.world]

    def to_json(self) -> str:
        """The parameters, and the rules for the reader."""
        return json.dumps({**asdict(self), "rules": asdict(self.rules)}, indent=2)

    @staticmethod
    def from_json(text: str) -> "WorldParameters":
        """The inverse of to_json. Raises ValueError if the rules have changed since: the same world can't be had."""
        content = json.loads(text)
        found = WorldParameters(**{field.name: content[field.name] for field in fields(WorldParameters)})
        if json.loads(json.dumps(asdict(found.rules))) != content["rules"]:
            raise ValueError(f"the rules of world {found.world!r} have changed since it was made; make it again")
        return found
