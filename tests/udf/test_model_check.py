"""`solaris model check`: each broken promise is found, in one line."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn

from solaris_udf.foundation import export
from solaris_udf.foundation.check import check_loaded, check_model
from solaris_udf.foundation.contract import load_description, write_description
from solaris_udf.foundation.export import export_split_model, export_unsplit_model
from solaris_udf.foundation.features import ModelError
from solaris_udf.foundation.model import Model, load_model
from tests.udf.small_model import INPUTS, Encoder, Head, Whole

TOLD = {"name": "small", "inputs": INPUTS, "heads": ["click"], "dense": 2}


@pytest.fixture
def folder(tmp_path):
    export_split_model(Encoder(), Head(), tmp_path / "small", **TOLD)
    return tmp_path / "small"


@pytest.mark.parametrize("fixed", [("USERS", "PAIRS"), ("USERS", "PAIRS", "LENGTHS"), ("LENGTHS",)])
def test_a_program_of_fixed_sizes_is_one_clear_error(tmp_path, monkeypatch, fixed):
    traced = {"USERS": export._USERS, "PAIRS": export._PAIRS, "LENGTHS": export._TRACE_LENGTHS}
    for name in fixed:
        monkeypatch.setattr(export, f"_OTHER_{name}", traced[name])

    class Positions(nn.Module):
        """Adds one weight a position, as learned positions do: they fix the length."""

        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.arange(16.0))

        def forward(self, users):
            return users["clicked_item"].float() @ self.weights

    encoder = Positions() if "LENGTHS" in fixed else Encoder()
    folder = tmp_path / "fixed"
    export_split_model(encoder, Head(), folder, lengths=traced["LENGTHS"], **TOLD)
    write_description(folder, embedding_dim=2, lengths=None, **TOLD)
    (error,) = check_model(folder)
    assert error.check in ("programs", "trial batch") and "\n" not in error.message
    if "LENGTHS" in fixed:
        assert error.message.startswith(f"{folder}: the programs fail on 4 users of full history length and 16 pairs")
        with pytest.raises(ModelError, match="are their sizes fixed"):
            load_model(folder)


def cast(name, dtype):
    """export's made-up inputs, with one of another dtype."""

    def change(made):
        return lambda *a: {key: value.astype(dtype) if key == name else value for key, value in made(*a).items()}

    return change


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("clicked_item", "int32", "takes users['clicked_item'] as int32 of 2 axes, but gets int64 of 2 axes"),
        ("clicked_item", "float64", "takes users['clicked_item'] as float64 of 2 axes, but gets int64 of 2 axes"),
        ("clicked_mask", "float32", "takes users['clicked_mask'] as float32 of 2 axes, but gets bool of 2 axes"),
        ("item_id", "int32", "takes items['item_id'] as int32 of 1 axes, but gets int64 of 1 axes"),
        ("item_dense", "float64", "takes items['item_dense'] as float64 of 2 axes, but gets float32 of 2 axes"),
    ],
)
@pytest.mark.parametrize("split", [True, False])
def test_a_program_of_other_dtypes_is_one_clear_error(tmp_path, monkeypatch, name, dtype, message, split):
    for maker in ("trial_users", "trial_items"):
        monkeypatch.setattr(export, maker, cast(name, dtype)(getattr(export, maker)))
    if split:
        export_split_model(Encoder(), Head(), tmp_path / "m", **TOLD)
    else:
        export_unsplit_model(Whole(), tmp_path / "m", **TOLD)
    file = "pair_model.pt2" if not split else "user_encoder.pt2" if "clicked" in name else "pair_head.pt2"
    expected = f"{tmp_path}/m/{file}: the program {message}; export it with the inputs that model.json names"
    (error,) = check_model(tmp_path / "m")
    assert (error.check, error.message) == ("programs", expected)
    with pytest.raises(ModelError, match="export it with the inputs"):
        load_model(tmp_path / "m")


class DictEncoder(nn.Module):
    def forward(self, users):
        return {"sum": (users["clicked_item"] * users["clicked_mask"]).sum(dim=1)}


class DictHead(Head):
    def forward(self, state, user_index, items):
        return super().forward(state["sum"], user_index, items)


def test_a_head_of_another_encoder_or_of_other_inputs_is_one_clear_error(folder, tmp_path):
    other = tmp_path / "other"
    export_split_model(DictEncoder(), DictHead(), other, **TOLD)
    shutil.copy(other / "pair_head.pt2", folder)
    write_description(folder, embedding_dim=2, **TOLD)
    (error,) = check_model(folder)
    assert "pair_head.pt2: the program lacks state; wants state['sum'], which it does not get;" in error.message

    export_split_model(Encoder(), Head(), other, **{**TOLD, "inputs": [*INPUTS, "item_category"]})
    write_description(other, embedding_dim=2, **{**TOLD, "inputs": [*INPUTS, "item_advertiser"]})
    (error,) = check_model(other)
    assert "the program lacks items['item_advertiser']; wants items['item_category'], which it" in error.message

    users = {name: torch.ones(3, 4, dtype=torch.int64) for name in ("clicked_item", "clicked_mask")}
    program = torch.export.export(Encoder(), (), {"users": users})
    program.example_inputs = None
    torch.export.save(program, other / "user_encoder.pt2")
    write_description(other, embedding_dim=2, **TOLD)
    (error,) = check_model(other)
    assert "the program must take (users) by position, and nothing else" in error.message


def test_a_program_of_bounded_sizes_is_found(tmp_path):
    class Bounded(Head):
        def forward(self, state, user_index, items):
            torch._check(user_index.shape[0] <= 500)
            return super().forward(state, user_index, items)

    folder = tmp_path / "bounded"
    export_split_model(Encoder(), Bounded(), folder, **TOLD)
    (error,) = check_model(folder)
    assert error.check == "large batch" and "are its sizes bounded" in error.message


@pytest.mark.parametrize(
    ("check", "embed"),
    [
        ("batch independence", lambda state, index, items: items["item_dense"] - items["item_dense"].mean(0)),
        ("padding", lambda state, index, items: items["item_dense"] * state["clicked_item"].shape[1]),
        ("repeatable", lambda state, index, items: np.random.random((len(index), 2)).astype(np.float32)),
        ("shapes", lambda state, index, items: items["item_dense"][:, :1]),
        ("finite", lambda state, index, items: items["item_dense"] / state["clicked_mask"].sum(1)[index, None]),
        (
            "any id",
            lambda state, index, items: np.log(items["item_id"].astype(np.float32))[:, None] + items["item_dense"],
        ),
    ],
)
def test_check_finds_each_broken_promise(folder, check, embed):
    description = load_description(folder)
    with np.errstate(all="ignore"):
        found = check_loaded(
            Model(
                description,
                lambda users: users,
                lambda state, index, items: lambda: (embed(state, index, items), np.zeros((len(index), 1))),
            )
        )
    assert check in [finding.check for finding in found if finding.level == "error"]
