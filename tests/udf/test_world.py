import math
import re
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from solaris_udf.world.draws import fold, key
from solaris_udf.world.ids import to_ids
from solaris_udf.world.items import make_items
from solaris_udf.world.log_rows import DUPLICATE, FUTURE, ORIGINAL, item_batches, log_batch
from solaris_udf.world.parameters import HOUR, RULES, WorldParameters
from solaris_udf.world.replay import replay
from solaris_udf.world.simulate import Rows, World, initial_state, simulate, state_at
from solaris_udf.world.state import drift

START = 1_767_225_600_000_000  # 2026-01-01
DAY = 24 * HOUR
USERS, DAYS = 60, 4
PARAMETERS = WorldParameters(world="standard", seed=5, users=USERS, items=60, start=START)


def make(
    world: str = "standard", seed: int = 5, users: int = USERS, items: int = 60, days: int = DAYS
) -> tuple[World, Rows]:
    found = World(WorldParameters(world=world, seed=seed, users=users, items=items, start=START))
    rows, _ = simulate(found, initial_state(found, np.arange(users)), START, START + days * DAY, seed)
    return found, rows


@pytest.fixture(scope="module")
def tiny() -> tuple[World, Rows]:
    return make()


@pytest.fixture(scope="module")
def larger() -> Rows:
    return make(users=400, items=800, days=4, seed=1)[1]


def table(rows: Rows) -> dict[tuple[int, int], tuple]:
    columns = [getattr(rows, field.name).tolist() for field in fields(Rows)]
    return {(row[0], row[2]): row for row in zip(*columns, strict=True)}


def requests(rows: Rows) -> dict[int, list[int]]:
    """request -> places of its rows, in order of position; requests in order of user and time."""
    found = defaultdict(list)
    for place, request in enumerate(rows.request.tolist()):
        found[request].append(place)
    return {request: sorted(places, key=lambda place: rows.position[place]) for request, places in found.items()}


def test_the_same_world_however_users_and_time_are_cut(tiny):
    _, whole = tiny
    world = World(PARAMETERS)
    parts = []
    for users in (np.array([0]), np.arange(1, 40), np.arange(59, 39, -1)):
        state = initial_state(world, users)
        for end in (START + 1, START + 17 * HOUR + 1_234_567, START + 18 * HOUR, START + 2 * DAY, START + DAYS * DAY):
            rows, state = simulate(world, state, state.time, end, PARAMETERS.seed)
            assert (rows.event_time < end).all()
            parts.append(rows)
    assert table(Rows.concat(parts)) == table(whole)
    assert table(make(seed=6)[1]) != table(whole)


def test_requests_are_well_formed(tiny):
    world, rows = tiny
    items = world.items(START + DAYS * DAY)
    sizes = []
    for places in requests(rows).values():
        sizes.append(len(places))
        assert rows.position[places].tolist() == list(range(len(places)))
        assert len(set(rows.item[places].tolist())) == len(places) <= 16
        assert len({(rows.user[place], rows.event_time[place], rows.surface[place]) for place in places}) == 1
    assert np.mean(sizes) > 13
    assert (rows.shown == (rows.position < 3)).all()
    assert (rows.shown | ~rows.clicked).all() and (rows.clicked | ~rows.converted).all()
    hour = START + (rows.event_time - START) // HOUR * HOUR
    assert (items.start[rows.item] <= hour).all() and (items.end[rows.item] > hour).all()
    assert (rows.event_time % 1000 != 0).mean() > 0.9  # microseconds
    assert set(rows.surface.tolist()) == {0, 1, 2}


def test_click_probabilities_follow_the_rules_by_hand():
    """Each hour's rows recomputed in plain Python from the log before them."""
    world = World(PARAMETERS)
    rules, truth = world.parameters.rules, world.truth
    state = initial_state(world, np.arange(25))
    shown, last = defaultdict(list), defaultdict(list)
    checked = fatigued = 0
    for _ in range(36):
        rows, after = simulate(world, state, state.time, state.time + HOUR, PARAMETERS.seed)
        items = world.items(after.time)
        for places in requests(rows).values():
            user, time = int(rows.user[places[0]]), int(rows.event_time[places[0]])
            taste = after.taste[:, user].tolist()
            for place in places:
                item = int(rows.item[place])
                vector = items.vector[:, item].tolist()
                linear = sum(a * b for a, b in zip(taste, vector, strict=True)) / 4
                second, third, fourth = (
                    sum(taste[order[dim]] * signs[dim] * vector[dim] for dim in range(16)) / 4
                    for order, signs in truth.views
                )
                match = 0.8 * math.tanh(linear) + 0.9 * math.sin(1.5 * second) + 0.6 * linear * math.tanh(third)
                effects = [truth.order_effects[clicked, items.category[item]] for clicked in last[user][::-1][:3]]
                order = sum(effect * decay for effect, decay in zip(effects, (1, 0.6, 0.35), strict=False))
                times = sum(time - 24 * HOUR < moment < time for moment in shown[user, item])
                logit = (
                    -3.9
                    + after.users.bias[user]
                    + (0, -0.3, 0.2)[rows.surface[place]]
                    + items.quality[item]
                    + 0.9 * match
                    + 1.8 * order
                    - 0.35 * times
                )
                assert rows.click_probability[place] == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-9)
                match = math.sin(1.5 * fourth) + 0.7 * second * math.tanh(linear) + 0.3 * third
                logit = -2 + after.users.conversion_bias[user] + items.conversion_quality[item] + match
                assert rows.conversion_probability[place] == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-9)
                checked, fatigued = checked + 1, fatigued + (times > 0)
            for place in places[:3]:
                shown[user, int(rows.item[place])].append(time)
                if rows.clicked[place]:
                    last[user].append(items.category[rows.item[place]])
        state = after
    assert checked > 2000 and fatigued > 200 and sum(map(len, last.values())) > 20
    assert rules.intercept == -3.9


def test_labels_are_drawn_with_their_probabilities(larger):
    shown, clicked = larger.shown, larger.clicked
    for label, chance in (
        (clicked[shown], larger.click_probability[shown]),
        (larger.converted[clicked], larger.conversion_probability[clicked]),
    ):
        assert abs(label.sum() - chance.sum()) < 4 * math.sqrt((chance * (1 - chance)).sum())


def test_the_standard_world_is_as_stated(larger):
    """Click rate, what is knowable, repeats and skew in the ranges that docs/world.md gives."""
    chance = larger.click_probability[larger.shown]
    rate = chance.mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    known = -(chance * np.log(chance) + (1 - chance) * np.log(1 - chance)).mean() / entropy
    assert 0.06 < rate < 0.11 and 0.62 < known < 0.78
    pair = larger.user * 10**6 + larger.item
    window = larger.event_time >= START + 90 * HOUR
    recent = (larger.event_time >= START + 18 * HOUR) & ~window
    assert 0.6 < np.isin(pair[window], pair[recent]).mean() < 0.8
    per_user = np.sort(np.bincount(larger.user, minlength=400))[::-1]
    assert per_user[:4].sum() > 0.04 * len(larger) and per_user[200:].sum() < 0.3 * len(larger)
    per_item = np.sort(np.bincount(larger.item))[::-1]
    assert per_item[:10].sum() > 5 * 10 / 800 * len(larger)
    assert 5 < len(requests(larger)) / 400 / 4 < 7
    by_hour = np.bincount((larger.event_time - START) // HOUR % 24, minlength=24)
    assert by_hour.max() > 1.3 * by_hour.min()


def test_the_hard_world_clicks_near_two_percent_and_is_less_knowable():
    _, rows = make(world="hard", users=300, items=400, days=2, seed=1)
    chance = rows.click_probability[rows.shown]
    rate = chance.mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert 0.012 < rate < 0.035
    assert -(chance * np.log(chance) + (1 - chance) * np.log(1 - chance)).mean() / entropy > 0.75


def test_tastes_drift_with_their_half_life_and_keep_their_spread():
    world = World(replace(PARAMETERS, users=2000))
    state = initial_state(world, np.arange(2000))
    before = state.deviation.copy()
    for hour in range(72):
        drift(state, world.parameters.rules, fold(fold(key(9, "drift"), state.users.number), hour))
    assert state.deviation.std() == pytest.approx(0.3, rel=0.03)
    assert np.corrcoef(before.ravel(), state.deviation.ravel())[0, 1] == pytest.approx(0.5, abs=0.03)


def test_a_place_always_has_one_campaign_and_numbers_do_not_depend_on_the_horizon():
    near, far = make_items(PARAMETERS, START + DAY), make_items(PARAMETERS, START + 40 * DAY)
    for field in ("start", "end", "category", "bid"):
        assert (getattr(near, field) == getattr(far, field)[: len(near.start)]).all()
    assert (near.vector == far.vector[:, : near.vector.shape[1]]).all()
    for time in range(START, START + 40 * DAY + 1, 7 * HOUR):
        running = far.running(time)
        assert (far.start[running] <= time).all() and (far.end[running] > time).all()
        assert sorted(running % 60) == list(range(60))
    new = np.bincount((far.start[(far.start >= START) & (far.start < START + 40 * DAY)] - START) // DAY, minlength=40)
    assert (new > 0).mean() > 0.9


def test_a_ranker_decides_what_is_shown_and_sees_the_past_as_it_was(tiny):
    world, _ = tiny
    asked = []

    def smallest_id(candidates):
        asked.append(candidates)
        return -candidates.item_id.astype(float)

    rows, _ = simulate(world, initial_state(world, np.arange(USERS)), START, START + 30 * HOUR, 5, smallest_id)
    items = world.items(START + 2 * DAY)
    ids, user_ids = to_ids("item", rows.item), to_ids("user", rows.user)
    seen = {}
    for candidates in asked:
        assert len(set(candidates.user_id.tolist())) == len(candidates.user_id)
        for at in range(len(candidates.user_id)):
            valid = candidates.valid[at]
            item_ids, times = candidates.item_id[at][valid].tolist(), candidates.times_shown[at][valid].tolist()
            seen[int(candidates.user_id[at]), int(candidates.event_time[at])] = (
                dict(zip(item_ids, times, strict=True)),
                [category for category in candidates.last_categories[at].tolist() if category >= 0],
            )
    shown, last = defaultdict(list), defaultdict(list)
    for places in requests(rows).values():
        user, time = int(user_ids[places[0]]), int(rows.event_time[places[0]])
        assert ids[places].tolist() == sorted(ids[places].tolist())
        times = {int(ids[place]): sum(moment > time - DAY for moment in shown[user, ids[place]]) for place in places}
        assert seen.pop((user, time)) == (times, last[user][::-1][:3])
        for place in places[:3]:
            shown[user, ids[place]].append(time)
            if rows.clicked[place]:
                last[user].append(items.category[rows.item[place]])
    assert not seen


def test_what_can_not_be_is_refused(tiny):
    world, _ = tiny
    state = initial_state(world, np.arange(3))
    with pytest.raises(ValueError, match="the state is at"):
        simulate(world, state, START + 1, START + HOUR, 5)
    with pytest.raises(ValueError, match="the end must be"):
        simulate(world, state, START, START - 1, 5)
    with pytest.raises(ValueError, match="NaN"):
        simulate(world, state, START, START + DAY, 5, lambda candidates: candidates.noisy_score * np.nan)
    with pytest.raises(ValueError, match="must be"):
        simulate(world, state, START, START + DAY, 5, lambda _: np.zeros(2))
    with pytest.raises(ValueError, match="from 0 to 59"):
        initial_state(world, np.array([60]))
    for wrong in ({"world": "odd"}, {"users": 0}, {"items": 0}):
        with pytest.raises(ValueError):
            replace(PARAMETERS, **wrong)
    rows, after = simulate(world, state, START, START, 5)
    assert len(rows) == 0 and after.time == START


@pytest.mark.parametrize("world", RULES)
def test_one_user_and_one_item_are_a_world(world):
    _, rows = make(world=world, users=1, items=1, days=3)
    assert len(rows) and set(rows.position.tolist()) == {0} and rows.shown.all()


def test_a_replay_is_another_future_of_the_same_past():
    world = World(PARAMETERS)
    users = np.arange(30)
    window = (START + 2 * DAY + 5 * HOUR, START + 2 * DAY + 11 * HOUR)
    state = state_at(world, users, window[0])
    later = initial_state(world, users)
    while later.time < window[0]:
        _, later = simulate(world, later, later.time, min(later.time + 7 * HOUR, window[0]), PARAMETERS.seed)
    for name in ("deviation", "campaigns", "shortlist", "last_categories", "shown_item", "shown_time", "shown_next"):
        assert (getattr(state, name) == getattr(later, name)).all()

    def pairs(seed, at=state):
        user, item, count = replay(PARAMETERS, at, window, seed, world=world)
        assert user.dtype == item.dtype == count.dtype == np.int64
        return dict(zip(zip(user.tolist(), item.tolist(), strict=True), count.tolist(), strict=True))

    assert pairs(101) == pairs(101, later) != pairs(102)
    # With the world's own seed it is what happened.
    happened = defaultdict(int)
    rows, _ = simulate(world, initial_state(world, users), START, window[1], PARAMETERS.seed)
    ids = to_ids("user", rows.user).tolist(), to_ids("item", rows.item).tolist()
    for user, item, time in zip(*ids, rows.event_time, strict=True):
        happened[user, item] += int(time >= window[0])
    assert pairs(PARAMETERS.seed) == {pair: count for pair, count in happened.items() if count}
    # Other seeds go on from the same campaign sets: pairs of the past come again.
    future = pairs(103)
    assert sum(count for pair, count in future.items() if pair in happened) > 0.6 * sum(future.values())


def test_the_log_has_late_duplicate_and_future_rows_and_late_conversions(larger):
    batch = log_batch(larger, RULES["standard"], 1)
    kind, late = (np.array(batch.column(name).to_pylist()) for name in ("kind", "late"))
    event, arrived, converted, reported = (
        batch.column(name).cast("int64").fill_null(-1).to_numpy()
        for name in ("event_time", "arrived_at", "converted_at", "conversion_arrived_at")
    )
    count = len(larger)
    assert (kind[:count] == ORIGINAL).all() and set(kind[count:].tolist()) == {DUPLICATE, FUTURE}
    assert abs((kind == DUPLICATE).sum() - 0.001 * count) < 4 * math.sqrt(0.001 * count)
    assert 0 < (kind == FUTURE).sum() < 0.0003 * count
    assert abs(late.sum() - 0.02 * count) < 4 * math.sqrt(0.02 * count)

    wait = (arrived - event)[:count] / 1e6
    assert (event[:count] == larger.event_time).all()
    assert wait.min() >= 0 and wait[~late[:count]].max() <= 5
    assert wait[late[:count]].min() >= 60 and 5.5 * 3600 < wait[late[:count]].max() <= 6 * 3600
    rows = list(zip(batch.column("request_id").to_pylist(), batch.column("item_id").to_pylist(), strict=True))
    first, ids = dict(zip(rows[:count], arrived.tolist(), strict=False)), {request for request, _ in rows[:count]}
    assert len(first) == count and len(ids) == len(requests(larger))
    years = set()
    for place in range(count, len(kind)):
        if kind[place] == DUPLICATE:
            assert arrived[place] > first[rows[place]]
        else:
            assert rows[place][0] not in ids and event[place] - arrived[place] >= HOUR
            years.add(batch.column("event_time")[place].as_py().year)
    assert years == {2026, 2099}

    assert ((converted >= 0) == np.r_[larger.converted, np.zeros(len(kind) - count, dtype=bool)]).all()
    happened = converted >= 0
    assert (event <= converted)[happened].all() and (converted <= reported)[happened].all()
    delays = (reported - event)[happened] / HOUR
    # An exponential of mean 6 cut at 24: mean 6 - 24 * exp(-4) / (1 - exp(-4)) = 5.552.
    assert delays.max() <= 24 and delays.mean() == pytest.approx(5.552, abs=4 * 6 / math.sqrt(len(delays)))


def test_log_rows_do_not_depend_on_the_rows_beside_them(tiny):
    _, rows = tiny
    whole = log_batch(rows, RULES["standard"], 5).to_pylist()
    some = Rows(**{field.name: getattr(rows, field.name)[100:163] for field in fields(Rows)})
    for row in log_batch(some, RULES["standard"], 5).to_pylist():
        assert row in whole


def test_item_rows_are_the_campaigns_that_began(tiny):
    world, _ = tiny
    end = START + DAYS * DAY
    items = world.items(end)
    rows = [row for batch in item_batches(items, end, size=17) for row in batch.to_pylist()]
    assert len(rows) == (items.start < end).sum() > 60
    assert max(row["created_at"].timestamp() for row in rows) * 1e6 < end
    assert {len(row["features"]) for row in rows} == {8}
    assert {row["objective"] for row in rows} == {"click", "conversion"}
    assert len({row["item_id"] for row in rows}) == len(rows) and len({row["advertiser_id"] for row in rows}) == 7
    assert np.std([math.log(row["bid"]) for row in rows]) == pytest.approx(0.5, rel=0.25)


def test_parameters_come_back_from_json_and_changed_rules_are_noticed():
    text = PARAMETERS.to_json()
    assert WorldParameters.from_json(text) == PARAMETERS
    with pytest.raises(ValueError, match="have changed"):
        WorldParameters.from_json(text.replace('"taste_weight": 0.9', '"taste_weight": 1.1'))


def test_the_example_in_the_documentation_runs():
    text = (Path(__file__).parents[2] / "docs" / "world.md").read_text(encoding="utf-8")
    found: dict = {}
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(code, found)
    assert len(found["rows"]) > 100 and found["scored_rows"].sum() > 0 and found["state"].time == found["window"][1]
