"""embed_pairs.model names a model outside the storage root: every job works with it, not only the one that embeds."""

import importlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pyspark.errors import PythonException
from torch import nn

from jobs import embed_pairs
from jobs.common.errors import UserError
from jobs.common.failures import outside_fault
from jobs.common.models import latest_model, models_until
from jobs.common.pair_scores import foundation_at
from jobs.common.vm_data import choose_span
from jobs.export_snapshot import find_source
from solaris_udf.codec import decode, encode
from solaris_udf.foundation import export
from solaris_udf.foundation.export import export_split_model
from solaris_udf.snapshot import Snapshot
from solaris_udf.tiers import PAIR, USER_MEAN
from tests.conftest import AS_OF, hours, log_row

LATER = AS_OF + hours(6)


class Clicks(nn.Module):
    def forward(self, users):
        return users["clicked_mask"].sum(dim=1)


class Head(nn.Module):
    """Embedding: clicks of the user, item id mod 7, 1."""

    def forward(self, state, user_index, items):
        clicks = state[user_index].float()
        return torch.stack([clicks, (items["item_id"] % 7).float(), torch.ones_like(clicks)], dim=1), clicks[:, None]


@pytest.fixture
def own(tmp_path):
    """A model of three dimensions in a folder of its own, and the settings that name it."""
    folder = tmp_path / "elsewhere" / "own"
    inputs = ["clicked_mask", "item_id"]
    description = export_split_model(Clicks(), Head(), folder, name="own", inputs=inputs, heads=["click"])
    settings = [f"embed_pairs.model={folder}", f'embed_pairs.model_roots=["{folder.parent}"]']
    return folder, description, settings


@pytest.fixture
def work(make_run):
    """work(as_of, settings, jobs...) runs the jobs; returns the last one's report."""

    def run(as_of, settings, *names):
        for name in names:
            report = importlib.import_module(f"jobs.{name}").run(*make_run(name, as_of, *settings))
        return report

    return run


@pytest.mark.slow
def test_a_named_model_takes_over_from_the_trained_one_in_every_job(fill, make_run, tables, root, own, work):
    _, description, named = own
    rows = [
        log_row(user, item, AS_OF - hours(9 - step), shown=True, clicked=item == 1 and step < user)
        for user in range(1, 5)
        for step in range(5)
        for item in range(4)
    ]
    fill("ranking_log", rows)  # user n has clicked n times
    fill("items", [{"item_id": item, "category_id": item % 2} for item in range(4)])
    tiny = [f"train_foundation.{text}" for text in ("size=tiny", "epochs=1", "embedding_dim=4", "threads=1")]
    work(AS_OF, tiny, "train_foundation")
    source = find_source(make_run("export_snapshot")[0])
    trained = source.model_version
    assert trained != description.version and source.dim == 4
    old = {"embedding": encode(np.ones((1, 4)))[0].as_py(), "model_version": trained}
    fill("pair_embeddings", [{"user_id": user, "item_id": item, **old} for user in (1, 2) for item in range(4)])

    work(LATER, named, "update_histories", "predict_pairs", "embed_pairs")
    # Nothing of the other model's is reused.
    chosen = tables.read_slice("candidate_pairs", LATER).select("user_id", "item_id", "action").collect()
    assert {row.action for row in chosen} == {"compute"} and len({row.user_id for row in chosen}) > 1
    # Until it covers enough, the trained model is served.
    waiting, _ = make_run("export_snapshot", LATER, *named, "serving.rollout_share=99")
    assert find_source(waiting) == source

    # Enough to take over, however many pairs the small log has for it.
    named = [*named, "serving.rollout_share=0.1"]
    work(LATER, named, "aggregate_users", "find_neighbors", "export_snapshot")
    means = {
        user: np.mean([[user, row.item_id % 7, 1] for row in chosen if row.user_id == user], axis=0)
        for user in {row.user_id for row in chosen}
    }
    stored = {row.user_id: row for row in tables.read_slice("user_embeddings", LATER).collect()}
    assert {row.model_version for row in stored.values()} == {description.version}
    for user, mean in means.items():
        np.testing.assert_allclose(decode([bytes(stored[user].embedding)])[0], mean, rtol=1e-3)
    neighbors = {row.user_id: row for row in tables.read_slice("user_neighbors", LATER).collect()}
    assert {row.model_version for row in neighbors.values()} == {description.version}
    unit = {user: mean / np.linalg.norm(mean) for user, mean in means.items()}
    for user, row in neighbors.items():
        assert {near.user_id for near in row.neighbors} == means.keys() - {user}
        for near in row.neighbors:
            assert near.similarity == pytest.approx(unit[user] @ unit[near.user_id], abs=2e-3)

    snapshot = Snapshot.open(root / "snapshots")
    assert snapshot.manifest.model_version == description.version and snapshot.manifest.dim == 3
    at = int((LATER + hours(1)).timestamp() * 1e6)
    answer = snapshot.lookup([row.user_id for row in chosen], [row.item_id for row in chosen], at)
    assert set(answer.tier.tolist()) == {PAIR}
    assert answer.embedding.tolist() == [[row.user_id, row.item_id % 7, 1] for row in chosen]
    unknown = snapshot.lookup(sorted(means), [999] * len(means), at)
    assert set(unknown.tier.tolist()) == {USER_MEAN}
    np.testing.assert_allclose(unknown.embedding, [means[user] for user in sorted(means)], rtol=1e-3)


def test_the_choice_and_the_evaluation_use_the_named_model(fill, make_run, own):
    folder, description, named = own
    row = {"request_id": "r", "event_time": AS_OF - hours(1), "user_id": 1, "item_id": 2, "surface": "feed"}
    row |= {"shown": True, "clicked": True, "snapshot_id": "s", "model_version": description.version, "tier": "pair"}
    served = {
        "embedding": encode(np.ones((1, 3)))[0].as_py(),
        "age_seconds": 1,
        "similarity": 1.0,
        "user_tier": "none",
        "user_age_seconds": -1,
        "user_similarity": 0.0,
    }
    fill("training_rows", [{**row, **served}])
    without = make_run("evaluate_uplift")[0]
    assert choose_span(without, AS_OF - hours(6)).folder is None
    run, _ = make_run("evaluate_uplift", AS_OF, *named)
    span = choose_span(run, AS_OF - hours(6))
    # When it was trained is not known, so no row is left out.
    assert (span.model_version, span.folder, span.start) == (description.version, folder, AS_OF - hours(6))
    assert span.trained is None

    found = foundation_at(run.config, AS_OF)
    assert found.version == description.version
    assert (found.costs.per_user, found.costs.per_pair) == (description.flops_per_user, description.flops_per_pair)
    assert foundation_at(without.config, AS_OF).version is None
    assert latest_model(run.config, "verifier", AS_OF) is None
    # Of one that was trained here that time is known: earlier rows are left out.
    shutil.copytree(folder, Path(without.config.path("models", "foundation")) / "20260102T210000Z")
    span = choose_span(without, AS_OF - hours(6))
    assert span.start == span.trained == AS_OF - hours(3)


@pytest.mark.parametrize(
    "name", ["predict_pairs", "embed_pairs", "aggregate_users", "find_neighbors", "export_snapshot"]
)
def test_every_job_refuses_a_named_model_outside_the_roots_or_that_is_not_there(make_run, own, work, name, tmp_path):
    folder, _, named = own
    with pytest.raises(UserError, match=r"own lies outside the allowed roots"):
        work(AS_OF, named[:1], name)
    with pytest.raises(UserError, match=r"elsewhere/typo is no model folder: model.json: No such file"):
        work(AS_OF, [*named, f"embed_pairs.model={folder.parent}/typo"], name)


def test_a_model_that_the_workers_refuse_is_one_line(fill, make_run, own, monkeypatch):
    folder, _, named = own
    items = export.trial_items
    monkeypatch.setattr(export, "trial_items", lambda *a: {"item_id": items(*a)["item_id"].astype(np.int32)})
    export_split_model(Clicks(), Head(), folder, name="own", inputs=["clicked_mask", "item_id"], heads=["click"])
    fill("candidate_pairs", [{"user_id": 1, "item_id": 5}])
    with pytest.raises(PythonException) as caught:
        embed_pairs.run(*make_run("embed_pairs", AS_OF, *named))
    assert outside_fault(caught.value) == (
        f"foundation model: {folder}/pair_head.pt2: the program takes items['item_id'] as int32 of 1 axes, but gets "
        "int64 of 1 axes; export it with the inputs that model.json names; solaris model check tells more"
    )


def test_a_named_model_that_lies_below_the_storage_root_counts_once(make_config, root, own):
    folder, _, _ = own
    trained = root / "models" / "foundation" / "20260101T000000Z"
    trained.parent.mkdir(parents=True)
    folder.rename(trained)
    config = make_config(f"embed_pairs.model={trained.parent}/../foundation/{trained.name}")
    assert [path.resolve() for path in models_until(config, "foundation", AS_OF)] == [trained]
