"""A new model runs beside the old one and is served once it covers enough."""

import pytest

from jobs.common.versions import model_version_at, served_model
from jobs.export_snapshot import find_source
from solaris_udf.foundation.contract import UNSPLIT_FILES, write_description
from tests.conftest import AS_OF, hours


@pytest.fixture
def model(root):
    """model(slice, content) writes a model folder; returns its version."""

    def write(name, content):
        folder = root / "models" / "foundation" / name
        folder.mkdir(parents=True)
        (folder / UNSPLIT_FILES[0]).write_text(content)
        inputs = ["clicked_item", "item_id"]
        return write_description(folder, name=content, embedding_dim=2, inputs=inputs, heads=["click"]).version

    return write


@pytest.mark.spark
def test_the_old_model_is_served_until_the_new_one_covers_enough(fill, make_run, model):
    old, new = model("20260101T000000Z", "old"), model("20260103T000000Z", "new")
    model("20260104T000000Z", "future")

    def embedded(age, version, pairs):
        rows = [
            {"user_id": 1, "item_id": item, "embedding": b"0000", "model_version": version} for item in range(pairs)
        ]
        fill("pair_embeddings", rows, AS_OF + hours(12 - age))

    def served(*options):
        run, _ = make_run("export_snapshot", AS_OF + hours(12), *options)
        version = model_version_at(run, run.tables.read("pair_embeddings"))
        assert find_source(run).model_version == version
        return version

    assert served() == new  # nothing is embedded yet
    embedded(40, old, 100)  # too old to be served
    embedded(20, old, 10)
    embedded(12, new, 7)
    assert served() == old  # 7 of 10
    assert served("serving.rollout_share=0.7") == new
    embedded(6, new, 1)
    assert served() == new  # 8 of 10
    before, _ = make_run("export_snapshot", AS_OF - hours(1))
    assert served_model(before).version == old
    assert served_model(make_run("export_snapshot", AS_OF - hours(100))[0]) is None
