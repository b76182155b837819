"""embed_pairs with a fake model."""

from pathlib import Path

import pytest

import jobs.embed_pairs as embed_pairs
from solaris_udf.foundation.udf import embed_udf_of
from tests.jobs.embed_fakes import description, fake, turned


@pytest.fixture
def with_model(monkeypatch, tmp_path):
    """with_model(options of the fake...) makes the job run the fake; returns the folder with its call records."""
    log = tmp_path / "calls"
    log.mkdir()

    def use(**options):
        monkeypatch.setattr(embed_pairs, "_model", lambda _: (Path("fake"), description()))
        monkeypatch.setattr(
            embed_pairs,
            "embed_udf",
            lambda folder, items, *, codec, threads, limits, rotation, **_: embed_udf_of(
                turned(fake(str(log), **options), rotation), items, codec=codec, threads=threads, limits=limits
            ),
        )
        return log

    return use
