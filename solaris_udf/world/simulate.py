"""Runs users forward in time from any state, under any ranker."""

import threading
from dataclasses import dataclass, fields, replace

import numpy as np

from solaris_udf.world.draws import Bool, Float64, Int64, UInt64, choose, fold, key, normal, poisson, uniform
from solaris_udf.world.ids import MAX_REQUESTS, request_words, to_ids
from solaris_udf.world.items import Items, make_items
from solaris_udf.world.parameters import HOUR, MAX_DAYS, WorldParameters
from solaris_udf.world.ranking import Candidates, Ranker, noisy_ranker, rank
from solaris_udf.world.state import (
    Market,
    State,
    drift,
    fill_campaigns,
    open_market,
    remember_click,
    remember_shown,
    renew_campaigns,
    renew_shortlists,
    times_shown,
)
from solaris_udf.world.truth import Truth
from solaris_udf.world.users import cluster_centres, make_users


@dataclass(frozen=True)
class Rows:
    """Scored rows [n], request by request: users in their order, and each user's requests in the order of time."""

    request: UInt64  # one word a request; hex_bytes writes it as the log's request_id
    user: Int64  # number
    item: Int64  # number
    event_time: Int64  # microseconds UTC
    surface: Int64  # place in SURFACES
    position: Int64  # place in the ranker's order
    shown: Bool
    clicked: Bool
    converted: Bool
    click_probability: Float64  # P(click if shown)
    conversion_probability: Float64  # P(conversion if clicked)

    def __len__(self) -> int:
        return len(self.user)

    @staticmethod
    def concat(parts: "list[Rows]") -> "Rows":
        names = [field.name for field in fields(Rows)]
        return Rows(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


class World:
    """A world's items and truth, shared by all its users. Items are made as far ahead as they are asked for."""

    def __init__(self, parameters: WorldParameters) -> None:
        self.parameters = parameters
        self.truth = Truth(parameters)
        self.centres = cluster_centres(parameters)
        self._lock = threading.Lock()
        self._items = make_items(parameters, parameters.start + 48 * HOUR)

    def items(self, until: int) -> Items:
        """All campaigns that start before a time (microseconds UTC), and some later ones. Numbers never change."""
        with self._lock:
            if self._items.horizon < until:
                # Twice as far as needed, so that going forward hour by hour makes them a few times only.
                self._items = make_items(self.parameters, until + (until - self.parameters.start))
            return self._items


def initial_state(world: World, users: Int64) -> State:
    """The state of the users of those numbers [n] at the world's start."""
    parameters, rules = world.parameters, world.parameters.rules
    chunk = make_users(parameters, users)
    count = len(chunk.number)
    items = world.items(parameters.start + HOUR)
    market = open_market(items, rules, parameters.start, world.centres)
    keys = fold(key(parameters.seed, "initial"), chunk.number)
    state = State(
        time=parameters.start,
        users=chunk,
        deviation=rules.taste_deviation * normal(fold(keys, np.arange(100, 100 + len(chunk.centre))[:, None])),
        campaigns=np.full((count, rules.campaign_set), -1, dtype=np.int64),
        shortlist=np.zeros((count, min(rules.shortlist, rules.taste_pool, parameters.items)), dtype=np.int64),
        last_categories=np.full((count, 3), -1, dtype=np.int64),
        shown_item=np.full((count, rules.fatigue_memory), -1, dtype=np.int64),
        shown_time=np.zeros((count, rules.fatigue_memory), dtype=np.int64),
        shown_next=np.zeros(count, dtype=np.int64),
    )
    for place in range(rules.campaign_set):  # one after the other, so that none is drawn twice where that can be
        renewed = np.zeros(state.campaigns.shape, dtype=bool)
        renewed[:, place] = True
        fill_campaigns(state, market, keys, renewed)
    renew_shortlists(state, rules, market)
    return state


def simulate(
    world: World, state: State, start: int, end: int, seed: int, ranker: Ranker = noisy_ranker
) -> tuple[Rows, State]:
    """Runs the state's users through [start, end) (microseconds UTC): the scored rows, and the state at the end.

    The state given is not changed. `seed` is that of the time from start on: with parameters.seed and the default
    ranker the world goes on as it does from its start; another seed gives another future of the same past. Cutting the
    time or the users differently gives the same rows. Memory: some 70 bytes a row; cut long times into slices.

    Raises ValueError if the state is not at start, if end is before it, or for scores that are no ranking.
    """
    if start != state.time:
        raise ValueError(f"the state is at {state.time}, not at the start {start}")
    last = world.parameters.start + MAX_DAYS * 24 * HOUR
    if not start <= end <= last:
        raise ValueError(f"the end must be from the start {start} to {last}, not {end}")
    state = state.copy()
    origin = world.parameters.start
    parts = [_no_rows()]
    for cell in range((start - origin) // HOUR, -((origin - end) // HOUR)):
        state, rows = _run_hour(world, state, cell, start, end, seed, ranker)
        parts.append(rows)
    return Rows.concat(parts), replace(state, time=end)


def state_at(world: World, users: Int64, time: int) -> State:
    """The state of users [n] at a time, by running them there from the world's start under its own ranker and seed."""
    state = initial_state(world, users)
    while state.time < time:  # day by day: the rows are not kept
        _, state = simulate(world, state, state.time, min(state.time + 24 * HOUR, time), world.parameters.seed)
    return state


def _run_hour(
    world: World, state: State, cell: int, start: int, end: int, seed: int, ranker: Ranker
) -> tuple[State, Rows]:
    """The part within [start, end) of hour `cell` since the world's start. Changes the state in place."""
    rules = world.parameters.rules
    begin = world.parameters.start + cell * HOUR
    items = world.items(begin + HOUR)
    begins = begin >= start  # else an earlier call has begun this hour
    anew = begins and cell % rules.shortlist_hours == 0
    market = open_market(items, rules, begin, world.centres if anew else None)
    keys = fold(fold(key(seed, "hours"), state.users.number), cell)
    if begins:
        drift(state, rules, keys)
        renew_campaigns(state, rules, market, keys)
        if anew:
            renew_shortlists(state, rules, market)

    counts = poisson(fold(keys, 4), state.users.request_rate(begin), MAX_REQUESTS)
    user = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
    own = fold(fold(keys, 5)[user], index)
    time = begin + (uniform(fold(own, 0)) * HOUR).astype(np.int64)
    within = np.flatnonzero((time >= start) & (time < end))
    order = within[np.lexsort((index[within], time[within], user[within]))]
    if not len(order):
        return state, _no_rows()
    user, index, own, time = user[order], index[order], own[order], time[order]
    item, valid = _retrieve(state, world, market, user, own)
    return state, _serve(world, state, seed, cell, ranker, items, user, index, own, time, item, valid)


def _retrieve(state: State, world: World, market: Market, user: Int64, own: UInt64) -> tuple[Int64, Bool]:
    """The items [r, w] that requests score, and which of them count: running, and not named twice in the request."""
    rules = world.parameters.rules

    def some(of: Int64, size: int, stream: int) -> Int64:
        columns = choose(fold(fold(own, stream)[:, None], np.arange(of.shape[1])), size)
        return np.take_along_axis(of[user], columns, axis=1)

    popular = market.draw(uniform(fold(fold(own, 3)[:, None], np.arange(rules.by_popularity))))
    item = np.concatenate(
        [some(state.campaigns, rules.from_campaigns, 1), some(state.shortlist, rules.by_taste, 2), popular], axis=1
    )
    valid = market.items.end[item] > market.time
    for column in range(1, item.shape[1]):
        valid[:, column] &= ~(item[:, :column] == item[:, column, None]).any(axis=1)
    return item, valid


def _serve(
    world: World,
    state: State,
    seed: int,
    cell: int,
    ranker: Ranker,
    items: Items,
    user: Int64,
    index: Int64,
    own: UInt64,
    time: Int64,
    item: Int64,
    valid: Bool,
) -> Rows:
    """Ranks, shows and lets click. Requests [r] are ordered by user and time; round k serves every user's k-th."""
    rules, truth = world.parameters.rules, world.truth
    limits = state.users.surface_limits[user]
    surface = (uniform(fold(own, 4))[:, None] >= limits).sum(axis=1)
    linear, click_match, conversion_match = truth.match(state.taste[:, user], items.vector[:, item])
    per_item = fold(fold(own, 5)[:, None], item)
    noisy = np.log(items.bid[item]) + items.quality[item] + 0.5 * linear + rules.score_noise * normal(per_item)
    conversion = truth.conversion(state.users, user, items, item, conversion_match)
    click = np.zeros(item.shape)
    position = np.zeros(item.shape, dtype=np.int64)
    clicked = np.zeros(item.shape, dtype=bool)
    user_id, item_id = to_ids("user", state.users.number[user]), to_ids("item", item.ravel()).reshape(item.shape)

    first = np.flatnonzero(np.diff(user, prepend=-1))
    turn = np.arange(len(user)) - np.repeat(first, np.diff(first, append=len(user)))
    by_turn = np.argsort(turn, kind="stable")
    for part in np.split(by_turn, np.cumsum(np.bincount(turn))[:-1]):
        who, what = user[part], item[part]
        last = state.last_categories[who]
        seen = times_shown(state, who, what, time[part], 24 * HOUR)
        places = rank(
            ranker(
                Candidates(
                    user_id=user_id[part],
                    item_id=item_id[part],
                    valid=valid[part],
                    event_time=time[part],
                    surface=surface[part],
                    last_categories=last,
                    times_shown=seen,
                    noisy_score=noisy[part],
                    items=items,
                    item=what,
                )
            ),
            valid[part],
        )
        chance = truth.click(state.users, who, items, what, click_match[part], last, seen, surface[part])
        hit = valid[part] & (places < rules.shown) & (uniform(fold(per_item[part], 1)) < chance)
        click[part], position[part], clicked[part] = chance, places, hit
        for place in range(rules.shown):
            row, column = np.nonzero((places == place) & valid[part])
            remember_shown(state, who[row], what[row, column], time[part][row])
            taken = hit[row, column]
            remember_click(state, who[row][taken], items.category[what[row, column][taken]])

    converted = clicked & (uniform(fold(per_item, 2)) < conversion)
    shown = valid & (position < rules.shown)
    width = valid.sum(axis=1)
    return Rows(
        request=np.repeat(request_words(seed, state.users.number[user], cell, index), width),
        user=np.repeat(state.users.number[user], width),
        item=item[valid],
        event_time=np.repeat(time, width),
        surface=np.repeat(surface, width),
        position=position[valid],
        shown=shown[valid],
        clicked=clicked[valid],
        converted=converted[valid],
        click_probability=click[valid],
        conversion_probability=conversion[valid],
    )


def _no_rows() -> Rows:
    whole, real, flag = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=bool)
    return Rows(
        request=whole.view(np.uint64),
        user=whole,
        item=whole,
        event_time=whole,
        surface=whole,
        position=whole,
        shown=flag,
        clicked=flag,
        converted=flag,
        click_probability=real,
        conversion_probability=real,
    )
