"""A training that is killed in the middle of an epoch goes on from its last checkpoint to the very same model."""

import logging
import os
import shutil
import signal
import subprocess
import sys

import pytest

import jobs.train_foundation as job
from jobs.common.config import load_config
from jobs.common.models import latest_model
from jobs.common.runs import Run
from jobs.common.session import build_session
from solaris_udf.foundation import training
from solaris_udf.foundation.check import check_model
from solaris_udf.foundation.contract import load_description
from tests.conftest import AS_OF, SESSION, hours, log_row

# One thread: repeatable to the bit.
OPTIONS = [
    f"train_foundation.{option}"
    for option in ("size=tiny", "epochs=4", "patience=4", "embedding_dim=4", "batch=8", "validation=0.2", "threads=1")
]


def killed(root):
    """The job in this process, which ends in the second step of the third epoch."""
    steps, real = [], training._Trainer._average_gradients

    def kill(self):
        steps.append(self.epoch)
        if steps.count(2) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self)

    training._Trainer._average_gradients = kill
    config = load_config(overrides=[f"storage.root={root}", *SESSION, *OPTIONS], environ={})
    run = Run("train_foundation", build_session(config, "killed"), config, AS_OF, "killed")
    job.run(run, config.get(job.Settings))


@pytest.mark.slow
def test_a_killed_training_goes_on_from_its_last_epoch_to_the_same_model(fill, make_run, root, monkeypatch, caplog):
    rows = [
        {
            **log_row(user, item, AS_OF - hours(30 - step), clicked=(item + step) % 3 == 0, shown=True),
            "request_id": f"{user}-{step}",
        }
        for user in range(8)
        for step in range(6)
        for item in range(3)
    ]
    fill("ranking_log", rows)
    fill("items", [{"item_id": item, "category_id": item} for item in range(3)])
    script = "import sys; from tests.jobs.test_train_foundation_killed import killed; killed(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    run, settings = make_run("train_foundation", AS_OF, *OPTIONS)
    folder = root / "models" / "foundation" / run.slice
    assert latest_model(run.config, "foundation", AS_OF) is None
    assert [file.name for file in folder.iterdir()] == ["checkpoint"]

    steps, real = [], training._Trainer._average_gradients

    def count(self):
        steps.append(self.epoch)
        real(self)

    monkeypatch.setattr(training._Trainer, "_average_gradients", count)
    caplog.set_level(logging.INFO, "solaris")
    resumed = job.run(run, settings)
    # Five of the six times of eight requests train, eight requests a step.
    assert "resuming after epoch 2" in caplog.text and steps == [2] * 5 + [3] * 5
    assert latest_model(run.config, "foundation", AS_OF) == folder and check_model(folder) == []
    assert sorted(file.name for file in folder.iterdir()) == ["model.json", "pair_head.pt2", "user_encoder.pt2"]

    version = load_description(folder).version  # of its bytes
    shutil.rmtree(folder)
    steps.clear()
    undisturbed = job.run(*make_run("train_foundation", AS_OF, *OPTIONS))
    assert steps == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    assert load_description(folder).version == version
    assert undisturbed.metrics == resumed.metrics
