"""The rows that a vertical model reads, as arrays: ids, numbers, what the snapshot served, and the labels."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from solaris_udf.codec import decode, encode
from solaris_udf.foundation.items import ItemTable
from solaris_udf.snapshot.lookup import Lookup
from solaris_udf.tiers import PAIR, PAIR_TIERS, TIER_NAMES

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.uint8]
Ages = npt.NDArray[np.int32]

HOUR_MICROS = 3_600_000_000
# The order of Rows.ids. The model drops out the first and crosses the second with the user-level vector.
ID_FIELDS = ("user_id", "item_id", "category_id", "advertiser_id", "surface", "hour")
NO_ID = np.iinfo(np.int64).min
AGE_SCALE = 12  # about log1p(two days in seconds)
_SLOT = len(TIER_NAMES) + 2  # flags of one slot: the tier one-hot, age, similarity


@dataclass(frozen=True)
class Rows:
    """n rows in time order.

    ids int64 [n, len(ID_FIELDS)], NO_ID where unknown; numbers float32 [n, k]; flags float32 [n, f]; pair and user
    float32 [n, d], zero where has_pair / has_user is false; label float32 [n] in {0, 1}; soft float32 [n], the
    foundation model's click probability, NaN where it gave none.
    """

    ids: Int64
    numbers: Float32
    flags: Float32
    pair: Float32
    has_pair: Bool
    user: Float32
    has_user: Bool
    label: Float32
    soft: Float32

    def __len__(self) -> int:
        return len(self.label)

    def take(self, index: "slice | npt.NDArray[np.int64] | Bool") -> "Rows":
        """The rows of an index."""
        return Rows(*(getattr(self, field.name)[index] for field in fields(self)))

    def shuffled(self, seed: int) -> "Rows":
        """What was served (vectors and flags alike) goes to a random other row: a control that must gain nothing."""
        order = np.random.default_rng(seed).permutation(len(self))
        served = ("flags", "pair", "has_pair", "user", "has_user")
        return replace(self, **{name: getattr(self, name)[order] for name in served})

    def masked(self, keep: Bool) -> "Rows":
        """As if the snapshot had served nothing to the rows that are not kept."""
        return self.without(~keep, ~keep)

    @property
    def tier(self) -> Codes:
        """Which tier answered each row, as a code of solaris_udf.tiers. uint8 [n]."""
        return self._of_flags(0)[0]

    @property
    def age_seconds(self) -> Ages:
        """Age of what answered, -1 for nothing. int32 [n]."""
        return self._of_flags(0)[1]

    @property
    def user_tier(self) -> Codes:
        """Which tier answered the user-level slot. uint8 [n]."""
        return self._of_flags(1)[0]

    def _of_flags(self, slot: int) -> tuple[Codes, Ages]:
        part = self.flags[:, slot * _SLOT : (slot + 1) * _SLOT]
        code = part[:, : len(TIER_NAMES)].argmax(axis=1).astype(np.uint8)
        age = np.rint(np.expm1(part[:, len(TIER_NAMES)].astype(np.float64) * AGE_SCALE)).astype(np.int32)
        return code, np.where(code > 0, age, -1).astype(np.int32)

    def without(self, pair: Bool, user: Bool) -> "Rows":
        """As if nothing had been served to these rows: in the pair's slot [n], in the user-level slot [n]."""
        nothing = nothing_served(len(self))
        gone = np.concatenate([np.repeat(pair[:, None], _SLOT, 1), np.repeat(user[:, None], _SLOT, 1)], axis=1)
        return replace(
            self,
            flags=np.where(gone, nothing, self.flags),
            pair=np.where(pair[:, None], np.float32(0), self.pair),
            has_pair=self.has_pair & ~pair,
            user=np.where(user[:, None], np.float32(0), self.user),
            has_user=self.has_user & ~user,
        )

    def only_tiers(self, tiers: Sequence[int]) -> "Rows":
        """As if the other tiers, by their codes, did not exist."""
        return self.without(~np.isin(self.tier, tiers), ~np.isin(self.user_tier, tiers))

    def no_pair_older_than(self, hours: float) -> "Rows":
        """As if pairs had been served for so long only: what is older has nothing in the pair's slot."""
        return self.without(
            np.isin(self.tier, PAIR_TIERS) & (self.age_seconds >= hours * 3600), np.zeros(len(self), bool)
        )

    def stored_as(self, codec: str) -> "Rows":
        """The vectors as they come back from a codec of solaris_udf.codec."""
        pair, user = (decode(encode(vectors, codec), codec) for vectors in (self.pair, self.user))
        return replace(self, pair=pair, user=user)

    def with_pairs(self, vectors: Float32, age_seconds: Ages) -> "Rows":
        """As if each row's own pair [n, d] had been served at that age; where that is NaN, a row keeps what it got."""
        has: Bool = np.asarray(np.isfinite(vectors).all(axis=1))
        code = np.where(has, PAIR, self.tier).astype(np.uint8)
        own = _slot_flags(code, age_seconds, np.ones(len(self), np.float32))
        flags = self.flags.copy()
        flags[:, :_SLOT] = np.where(has[:, None], own, flags[:, :_SLOT])
        return replace(self, flags=flags, pair=np.where(has[:, None], vectors, self.pair), has_pair=self.has_pair | has)

    def buckets(self, sizes: Sequence[int]) -> Int64:
        """ids hashed to 1..size-1, one size a field; 0 where unknown. int64 [n, fields]."""
        fields_apart = np.arange(self.ids.shape[1], dtype=np.uint64)
        mixed = _mix(np.add(self.ids.astype(np.uint64), fields_apart, dtype=np.uint64))
        places = (mixed % (np.array(sizes, np.uint64) - np.uint64(1))).astype(np.int64)
        return np.where(self.ids == NO_ID, 0, 1 + places)


@dataclass(frozen=True)
class Context:
    """What a model sees of n rows beside the vectors.

    user_id, item_id, event_time (microseconds UTC) int64 [n]; surface int64 [n], see surface_id; user_counts int64
    [n, 3], the user's requests, shown and clicked rows, and item_counts int64 [n, 2], the item's shown and clicked
    rows, both as counted before the window.
    """

    user_id: Int64
    item_id: Int64
    event_time: Int64
    surface: Int64
    user_counts: Int64
    item_counts: Int64


def make_rows(
    context: Context, items: ItemTable, served: Lookup, label: Float32 | None = None, soft: Float32 | None = None
) -> Rows:
    """The rows of a context with what a lookup returned for them. Without labels they are 0, without soft labels NaN.

    A vector of another user's or the user's mean is no pair's: the pair's slot holds vectors computed for the very item
    only, and the mean goes into the user-level slot.
    """
    count = len(context.user_id)
    item = items.rows_of(context.item_id)
    known = item >= 0
    ids = np.stack(
        [
            context.user_id,
            context.item_id,
            np.where(known, items.category(item), NO_ID),
            np.where(known, items.advertiser(item), NO_ID),
            context.surface,
            context.event_time // HOUR_MICROS % 24,
        ],
        axis=1,
    )
    shown, clicked = context.user_counts[:, 1], context.user_counts[:, 2]
    numbers = np.concatenate(
        [
            np.log1p(context.user_counts),
            _rate(clicked, shown)[:, None],
            np.log1p(context.item_counts),
            _rate(context.item_counts[:, 1], context.item_counts[:, 0])[:, None],
            np.log1p(items.age_hours(item, context.event_time))[:, None],
            items.dense(item),
        ],
        axis=1,
    ).astype(np.float32)
    has_pair = np.isin(served.tier, PAIR_TIERS)
    has_user = served.user_tier > 0
    return Rows(
        ids=ids,
        numbers=numbers,
        flags=flags_of(
            served.tier,
            served.age_seconds,
            served.similarity,
            served.user_tier,
            served.user_age_seconds,
            served.user_similarity,
        ),
        pair=np.where(has_pair[:, None], served.embedding, np.float32(0)),
        has_pair=has_pair,
        user=np.where(has_user[:, None], served.user_embedding, np.float32(0)),
        has_user=has_user,
        label=np.zeros(count, np.float32) if label is None else label,
        soft=np.full(count, np.nan, np.float32) if soft is None else soft,
    )


def surface_id(names: Iterable[str]) -> Int64:
    """Surfaces as ids: 64 bits of a hash of the name, the same in every process."""
    values = list(names)
    codes = {
        name: int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
        for name in set(values)
    }
    return np.array([codes[name] for name in values], dtype=np.int64)


def _rate(clicked: Int64, shown: Int64) -> npt.NDArray[np.float64]:
    """Logarithm of the click rate, drawn towards 5% by 20 rows, so that a rate of few rows says little."""
    return np.log((clicked + 1.0) / (shown + 20.0))


def flags_of(
    tier: Codes,
    age_seconds: Ages,
    similarity: Float32,
    user_tier: Codes,
    user_age_seconds: Ages,
    user_similarity: Float32,
) -> Float32:
    """Where the vectors came from and how old they are, float32 [n, 2 * (tiers + 2)]."""
    return np.concatenate(
        [
            _slot_flags(tier, age_seconds, similarity),
            _slot_flags(user_tier, user_age_seconds, user_similarity),
        ],
        axis=1,
    )


def _slot_flags(tier: Codes, age_seconds: Ages, similarity: Float32) -> Float32:
    age = np.log1p(np.maximum(age_seconds, 0)).astype(np.float32)[:, None] / np.float32(AGE_SCALE)
    return np.concatenate(
        [np.eye(len(TIER_NAMES), dtype=np.float32)[tier], age, similarity.astype(np.float32)[:, None]], axis=1
    )


def nothing_served(count: int) -> Float32:
    """flags_of for rows that got no vector."""
    code, age, near = np.zeros(count, np.uint8), np.full(count, -1, np.int32), np.zeros(count, np.float32)
    return flags_of(code, age, near, code, age, near)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele et al., 2014): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        values = values * np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
