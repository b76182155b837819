"""The GPU path with a device that only pretends: what is copied where, what waits for what, and lack of memory."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from solaris_udf.foundation import udf
from solaris_udf.foundation.device import Device
from solaris_udf.foundation.inference import Limits, embed_batches
from solaris_udf.foundation.model import load_model
from solaris_udf.foundation.programs import peak_bytes
from tests.udf.test_foundation_inference import Fake, batch, items, user  # noqa: F401
from tests.udf.test_foundation_model import ITEMS, USERS, exported  # noqa: F401


class Gpu:
    """Stands in for CUDA: tensors stay where they are, and everything that happens is noted in order."""

    def __init__(self, monkeypatch):
        self.log, real = [], torch.Tensor.to
        gpu = self

        def to(tensor, target, *more, non_blocking=False, **named):
            if isinstance(target, str):
                gpu.log.append((target, "async" if non_blocking else "blocking"))
                return tensor
            return real(tensor, target, *more, **named)

        class Event:
            def record(self):
                gpu.log.append("record")

            def synchronize(self):
                gpu.log.append("wait")

        def pinned(tensor):
            gpu.log.append("pin")
            return tensor

        monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
        monkeypatch.setattr(torch.Tensor, "to", to)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch, "autocast", lambda kind, dtype: self.log.append((kind, dtype)) or nullcontext())
        monkeypatch.setattr("torch.export.passes.move_to_device_pass", self.move)

    def move(self, program, target):
        self.log.append(("program", target))
        return program


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_arrays_go_through_pinned_memory_and_results_are_waited_for_only_when_read(gpu):
    place = Device("cuda:3", half=True)
    tensor = place.tensor(np.arange(3))
    assert gpu.log == ["pin", ("cuda:3", "async")]
    gpu.log.clear()
    wait = place.fetched(tensor.half(), tensor)
    assert gpu.log == [("cpu", "async"), ("cpu", "async"), "record"]
    values = wait()
    assert gpu.log[-1] == "wait" and [each.dtype for each in values] == [np.float32, np.float32]
    assert values[0].tolist() == [0, 1, 2]
    with place.autocast():
        assert gpu.log[-1] == ("cuda", torch.float16)


def test_on_a_cpu_nothing_is_pinned_halved_or_waited_for(gpu):
    place = Device("cpu", half=True)
    wait = place.fetched(place.tensor(np.arange(3)))
    with place.autocast():
        pass
    assert wait()[0].tolist() == [0, 1, 2] and gpu.log == [("cpu", "blocking")]


def test_a_model_runs_whole_on_the_device_that_it_was_loaded_for(exported, gpu):  # noqa: F811
    model = load_model(exported, device="cuda:1", half=True)
    assert gpu.log == [("program", "cuda:1")] * 2
    gpu.log.clear()
    wait = model.start_pairs(model.encode_users(USERS), np.array([0, 1, 1]), ITEMS)
    assert "wait" not in gpu.log and {each[0] for each in gpu.log if isinstance(each, tuple)} == {
        "cuda:1",
        "cuda",
        "cpu",
    }
    assert gpu.log.count(("cuda", torch.float16)) == 2  # half precision for both parts
    assert wait()[0].tolist() == [[7, 0.5], [8, 1.5], [8, 2.5]]


def test_the_next_batch_is_started_before_the_last_is_waited_for(items):  # noqa: F811
    fake, log = Fake(), []
    model = fake.model()

    def start(state, index, given):
        wait, number = model.start_pairs(state, index, given), len(fake.pairs)
        log.append(f"start {number}")
        return lambda: log.append(f"wait {number}") or wait()

    watched, limits = type(model)(model.description, model.encode_users, start), Limits(pairs=2)
    found = [len(out) for out in embed_batches([batch(user(1, [1, 2, 3, 4, 5]))], watched, items, limits=limits)]
    assert found == [2, 2, 1]
    assert log == ["start 1", "start 2", "wait 1", "start 3", "wait 2", "wait 3"]


def test_lack_of_memory_while_a_batch_is_under_way_loses_nothing(items, monkeypatch):  # noqa: F811
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    model, sizes = Fake().model(), []

    def start(state, index, given):
        sizes.append(len(index))
        if len(sizes) > 1 and len(index) > 3:  # the second batch no longer fits
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model.start_pairs(state, index, given)

    tight = type(model)(model.description, model.encode_users, start)
    rows = [
        item
        for out in embed_batches([batch(user(1, list(range(20))))], tight, items, limits=Limits(pairs=8))
        for item in out["item_id"].to_pylist()
    ]
    assert sorted(rows) == list(range(20)) and len(emptied) == 2
    assert sizes == [8, 8, 4, 2, 2, 2, 2, 2, 2]


def test_the_device_is_the_address_that_spark_gave_the_task(monkeypatch):
    def task(resources):
        monkeypatch.setattr("pyspark.TaskContext.get", lambda: SimpleNamespace(resources=lambda: resources))

    task({"gpu": SimpleNamespace(addresses=["5"])})
    assert udf.assigned_device() == "cuda:5"
    task({})
    assert udf.assigned_device() == "cpu"
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: None)
    assert udf.assigned_device() == "cpu"


def test_memory_is_that_of_what_is_alive_at_one_time():
    class Chain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1000))

        def forward(self, x):  # x: 100 floats; wide: 1000, gone after the sum
            wide = x.repeat(10) * self.weight
            return x + wide.sum()

    program = torch.export.export(Chain(), (torch.ones(100),))
    out, peak = peak_bytes(program, torch.ones(100))
    assert out[0] == 1001
    assert peak == 4 * (100 + 1000 + 1000)  # x, its repetition and the product; no weights


def test_batches_keep_the_bound_in_bytes():
    limits = Limits(tokens=10_000, pairs=500, bytes=1_000_000)
    assert limits.batch_pairs(length=8, bytes_per_pair=10_000) == 100
    assert limits.batch_pairs(length=8, bytes_per_pair=1_000) == 500 and limits.batch_pairs(100, 1_000) == 100
    assert limits.batch_pairs(length=8, bytes_per_pair=2_000_000) == 1
    assert limits.group_tokens(bytes_per_token=500) == 2_000 and limits.group_tokens(0) == 10_000
