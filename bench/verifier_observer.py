"""What can be known at best of the simulated platform without looking into it.

The replay oracle knows each user's campaign set and shortlist, which no predictor can: the log shows of them only what
was scored. The observer knows the world's rules, how often each user really comes and when each campaign really ends,
but of the sets only the log: a Bayesian filter over each pair, request by request. It approximates the best that a
predictor of the log could do, given those; a learned one has to find them out too.
"""

import numpy as np
import numpy.typing as npt
import pandas as pd

from solaris_udf.world.ids import to_ids
from solaris_udf.world.parameters import HOUR
from solaris_udf.world.simulate import World
from solaris_udf.world.users import make_users

SHORTLIST_KEPT = 0.98  # of a shortlist when it is made anew: tastes move slowly
BY_CHANCE = 0.005  # P(a request scores an item of neither set): the few drawn by popularity
Float64 = npt.NDArray[np.float64]


class Observer:
    """The filter of one world. log: user_id, item_id, request_id, event and arrival (microseconds) of scored rows."""

    def __init__(self, world: World, log: pd.DataFrame, until: int) -> None:
        rules, users = world.parameters.rules, np.arange(world.parameters.users)
        self.rules, self.log = rules, log
        self.users = make_users(world.parameters, users)
        self.numbers = pd.Series(users, index=to_ids("user", users))
        items = world.items(until)
        self.ends = pd.Series(items.end, index=to_ids("item", np.arange(len(items.end))))
        self.enters = rules.campaign_set / (rules.campaign_hours * world.parameters.items)  # an hour, of any item
        self.held = min(1.0, rules.campaign_set / world.parameters.items)
        self.listed = min(1.0, rules.shortlist / world.parameters.items)
        campaign, taste = rules.from_campaigns / rules.campaign_set, rules.by_taste / rules.shortlist
        # P(scored by a request) of a pair in neither set, the shortlist, the campaigns, both.
        self.scored = np.array([BY_CHANCE, taste, campaign, 1 - (1 - campaign) * (1 - taste)])

    def values(self, pairs: pd.DataFrame, start: int, hours: float) -> Float64:
        """Expected rows in [start, start + hours) of pairs (user_id, item_id) by what had arrived by then [n]."""
        log = self.log[(self.log["event"] < start) & (self.log["arrival"] <= start)]
        requests = log.groupby(["user_id", "request_id"], as_index=False)["event"].min()
        requests = requests.sort_values(["user_id", "event", "request_id"], ignore_index=True)
        requests["turn"] = requests.groupby("user_id").cumcount()
        turns = log.merge(requests[["user_id", "request_id", "turn"]], on=["user_id", "request_id"])
        place = pd.Series(np.arange(len(pairs)), index=pd.MultiIndex.from_frame(pairs[["user_id", "item_id"]]))
        turns["pair"] = place.reindex(pd.MultiIndex.from_frame(turns[["user_id", "item_id"]])).to_numpy()
        hits = dict(iter(turns.dropna().groupby("turn")["pair"]))

        listed = np.array([1 - self.listed, self.listed])
        before = np.concatenate([listed * (1 - self.held), listed * self.held])
        belief, last = np.tile(before, (len(pairs), 1)), np.full(len(pairs), np.nan)
        user = pairs["user_id"].to_numpy()
        for turn, of_turn in requests.groupby("turn"):
            event = of_turn.set_index("user_id")["event"].reindex(user).to_numpy()
            now = np.flatnonzero(~np.isnan(event))
            passed = np.nan_to_num((event[now] - last[now]) / HOUR)
            moved = self._later(belief[now], passed)
            seen = np.zeros(len(pairs), dtype=bool)
            if turn in hits:
                seen[hits[turn].to_numpy(dtype=np.int64)] = True
            moved *= np.where(seen[now, None], self.scored, 1 - self.scored)
            belief[now], last[now] = moved / moved.sum(axis=1, keepdims=True), event[now]
        middle = start + hours * HOUR / 2
        belief = self._later(belief, np.nan_to_num((middle - last) / HOUR, nan=hours))
        runs = np.clip((self.ends.reindex(pairs["item_id"]).to_numpy() - start) / (hours * HOUR), 0, 1)
        rate = sum(self.users.request_rate(start + hour * HOUR) for hour in range(round(hours)))
        out: Float64 = (belief @ self.scored) * runs * np.asarray(rate)[self.numbers.reindex(user).to_numpy()]
        return out

    def _later(self, belief: Float64, hours: Float64) -> Float64:
        """The belief [n, 4] some hours [n] later."""
        stays = np.exp(-hours / self.rules.campaign_hours)
        comes = np.minimum(0.5, self.enters * hours)
        kept = SHORTLIST_KEPT ** (hours / self.rules.shortlist_hours)
        listed = self.listed * (1 - kept)
        out, inside = belief[:, :2], belief[:, 2:]
        without = out * (1 - comes[:, None]) + inside * (1 - stays[:, None])
        within = inside * stays[:, None] + out * comes[:, None]
        both = []
        for part in (without, within):
            off, on = part[:, 0], part[:, 1]
            both += [off * (1 - listed) + on * (1 - kept), on * kept + off * listed]
        return np.stack(both, axis=1)
