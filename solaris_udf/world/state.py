"""The state of users at a moment: all that the future depends on, and how it moves from hour to hour."""

from dataclasses import dataclass, replace

import numpy as np

from solaris_udf.world.draws import Bool, Float64, Int64, UInt64, fold, normal, uniform
from solaris_udf.world.items import Items
from solaris_udf.world.parameters import DIM, Rules
from solaris_udf.world.truth import dot
from solaris_udf.world.users import Users

TRIES = 3  # campaigns that compete for a place in a user's set; the one nearest to the taste gets it


@dataclass(frozen=True)
class State:
    """Users [n] at a time (microseconds UTC): what happened at the time itself is not in it yet."""

    time: int
    users: Users
    deviation: Float64  # [DIM, n] taste minus the cluster's centre
    campaigns: Int64  # [n, campaign_set] item numbers
    shortlist: Int64  # [n, shortlist] item numbers, the best by taste
    last_categories: Int64  # [n, 3] of the last clicks, newest first, -1 for none
    shown_item: Int64  # [n, fatigue_memory] a ring of what was shown, -1 for nothing
    shown_time: Int64  # [n, fatigue_memory]
    shown_next: Int64  # [n] next place to write in the ring

    @property
    def taste(self) -> Float64:
        return self.users.centre + self.deviation

    def copy(self) -> "State":
        return replace(
            self,
            deviation=self.deviation.copy(),
            campaigns=self.campaigns.copy(),
            shortlist=self.shortlist.copy(),
            last_categories=self.last_categories.copy(),
            shown_item=self.shown_item.copy(),
            shown_time=self.shown_time.copy(),
            shown_next=self.shown_next.copy(),
        )


@dataclass(frozen=True)
class Market:
    """What the items offer during one hour."""

    items: Items
    time: int
    running: Int64  # [places] campaigns
    limits: Float64  # [places] cumulative delivery weights, ending at 1
    pools: tuple[Int64, ...]  # a cluster's nearest running campaigns; empty in hours without new shortlists

    def draw(self, chances: Float64) -> Int64:
        """Campaigns by delivery weight, from uniforms of any shape."""
        place = np.minimum(np.searchsorted(self.limits, chances, side="right"), len(self.running) - 1)
        out: Int64 = self.running[place]
        return out


def open_market(items: Items, rules: Rules, time: int, centres: Float64 | None) -> Market:
    """The market of the hour that begins at a time. With cluster centres [clusters, DIM], also the pools."""
    running = items.running(time)
    limits = np.cumsum(items.weights(running, time))
    pools: list[Int64] = []
    if centres is not None:
        near = dot(np.ascontiguousarray(centres.T), items.vector[:, None, running])  # [clusters, places]
        pools = [running[_best(row[None, :], min(rules.taste_pool, len(running)))[0]] for row in near]
    return Market(items, time, running, limits / limits[-1], tuple(pools))


def drift(state: State, rules: Rules, keys: UInt64) -> None:
    """One hour of the Ornstein-Uhlenbeck process of the tastes, exactly."""
    keep = 2.0 ** (-1.0 / rules.taste_half_life_hours)
    step = rules.taste_deviation * np.sqrt(1.0 - keep**2)
    noise = normal(fold(fold(keys, 1), np.arange(DIM)[:, None]))
    state.deviation[:] = keep * state.deviation + step * noise


def renew_campaigns(state: State, rules: Rules, market: Market, keys: UInt64) -> None:
    """Replaces places of the users' campaign sets: those whose time has come and those whose campaign has ended."""
    leave = 1.0 - np.exp(-1.0 / rules.campaign_hours)
    chances = uniform(fold(fold(keys, 2)[:, None], np.arange(rules.campaign_set)))
    renewed = (chances < leave) | (market.items.end[state.campaigns] <= market.time)
    fill_campaigns(state, market, keys, renewed)


def fill_campaigns(state: State, market: Market, keys: UInt64, renewed: Bool) -> None:
    """Draws new campaigns for the places [n, campaign_set] that are marked."""
    user, place = np.nonzero(renewed)
    if not len(user):
        return
    own = fold(fold(keys, 3)[user], place)
    offers = market.draw(uniform(fold(own[:, None], np.arange(TRIES))))
    near = dot(state.taste[:, user], market.items.vector[:, offers])
    held = (offers[:, :, None] == state.campaigns[user][:, None, :]).any(axis=2)
    best = np.argmax(np.where(held, near - 1e6, near), axis=1)
    state.campaigns[user, place] = offers[np.arange(len(user)), best]


def renew_shortlists(state: State, rules: Rules, market: Market) -> None:
    """Every user's best running items by taste, of their cluster's pool."""
    for cluster, pool in enumerate(market.pools):
        members = np.flatnonzero(state.users.cluster == cluster)
        if len(members):
            taste = state.taste[:, members].astype(np.float32)
            near = dot(taste, market.items.vector[:, None, pool])
            state.shortlist[members] = pool[_best(near, state.shortlist.shape[1])]


def _best(scores: np.ndarray, size: int) -> Int64:
    """Columns of the highest scores of each row, ascending."""
    if size >= scores.shape[1]:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape).copy()
    out: Int64 = np.sort(np.argpartition(-scores, size - 1, axis=1)[:, :size], axis=1)
    return out


def times_shown(state: State, user: Int64, item: Int64, time: Int64, hours: int) -> Int64:
    """How often each pair (user [r], item [r, w]) was shown in the hours before the time [r]: [r, w]."""
    recent = np.where(state.shown_time[user] > (time - hours)[:, None], state.shown_item[user], -1)
    out = np.empty(item.shape, dtype=np.int64)
    for column in range(item.shape[1]):
        out[:, column] = np.count_nonzero(recent == item[:, column, None], axis=1)
    return out


def remember_shown(state: State, user: Int64, item: Int64, time: Int64) -> None:
    """Adds one shown item to each of the (distinct) users' memory: [k] each."""
    place = state.shown_next[user]
    state.shown_item[user, place] = item
    state.shown_time[user, place] = time
    state.shown_next[user] = (place + 1) % state.shown_item.shape[1]


def remember_click(state: State, user: Int64, category: Int64) -> None:
    """Adds one click to each of the (distinct) users' memory: [k] each."""
    state.last_categories[user, 1:] = state.last_categories[user, :-1]
    state.last_categories[user, 0] = category
