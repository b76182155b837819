"""Model folders: what is accepted, what is refused before anything of it is loaded, and what `model check` finds."""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from solaris_udf.foundation.check import check_model, examine_model
from solaris_udf.foundation.contract import load_description, sha256_of
from solaris_udf.foundation.export import export_split_model, export_unsplit_model
from solaris_udf.foundation.features import ModelError
from solaris_udf.foundation.model import is_out_of_memory, load_model
from solaris_udf.foundation.programs import check_program
from solaris_udf.foundation.reference import hashed
from tests.udf.small_model import INPUTS, Encoder, Head, Whole


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "small"
    export_split_model(Encoder(), Head(), folder, name="small", inputs=INPUTS, heads=["click"], dense=2)
    return folder


@pytest.fixture
def folder(exported, tmp_path):
    return Path(shutil.copytree(exported, tmp_path / "small"))


USERS = {
    "clicked_item": np.array([[12, 5, 0], [8, 0, 0]]),
    "clicked_mask": np.array([[1, 1, 0], [1, 0, 0]], dtype=bool),
}
ITEMS = {"item_id": np.array([1, 2, 3]), "item_dense": np.array([[0.5, 0], [1.5, 0], [2.5, 0]], dtype=np.float32)}


@pytest.mark.parametrize("split", [True, False])
def test_an_exported_model_computes_what_the_module_does(exported, tmp_path, split):
    folder = exported
    if not split:
        folder = tmp_path / "whole"
        export_unsplit_model(Whole(), folder, name="whole", inputs=INPUTS, heads=["click"], dense=2)
    model = load_model(folder)
    embedding, logits = model.start_pairs(model.encode_users(USERS), np.array([0, 1, 1]), ITEMS)()
    assert embedding.tolist() == [[7, 0.5], [8, 1.5], [8, 2.5]] and logits.tolist() == [[7.5], [9.5], [10.5]]
    assert (model.description.split, model.description.embedding_dim, model.description.dense) == (split, 2, 2)
    found = {finding.check: finding.level for finding in examine_model(folder)}
    assert "error" not in found.values() and (found.get("split") == "warning") is not split


@pytest.mark.slow
def test_a_compiled_model_computes_the_same_at_any_size(exported):
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    model = load_model(exported, compiled=True)
    for pairs in (3, 5):
        index, ids = np.arange(pairs) % 2, np.arange(pairs)
        given = {"item_id": ids, "item_dense": np.stack([ids + 0.5, ids], axis=1).astype(np.float32)}
        embedding, _ = model.start_pairs(model.encode_users(USERS), index, given)()
        assert embedding.tolist() == [[7 + place, item + 0.5] for place, item in zip(index, ids, strict=True)]


def test_the_version_is_the_hash_of_the_description_and_the_same_on_a_second_export(exported, tmp_path):
    again = export_split_model(Encoder(), Head(), tmp_path / "x", name="small", inputs=INPUTS, heads=["click"], dense=2)
    assert again.version == sha256_of(exported / "model.json")[:12]


def test_a_changed_byte_a_missing_file_and_a_foreign_folder_are_refused(folder, tmp_path):
    load_description(folder, [tmp_path])
    with pytest.raises(ModelError, match="outside the allowed roots"):
        load_description(folder, [tmp_path / "other"])
    with (folder / "pair_head.pt2").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match=r"pair_head.pt2 does not match its hash"):
        load_model(folder)
    (folder / "pair_head.pt2").unlink()
    assert [finding.level for finding in check_model(folder)] == ["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version is 2, this code reads 1"),
        ({"embedding_dim": 0}, "embedding_dim must be a whole number of at least 1, not 0"),
        ({"files": {"../user_encoder.pt2": "", "pair_model.pt2": ""}}, "must lie inside the folder"),
        ({"files": {"/etc/passwd": "", "pair_model.pt2": ""}}, "must lie inside the folder"),
        ({"files": {"user_encoder.pt2": "0"}}, "files must hold user_encoder.pt2 and pair_head.pt2, or pair_model.pt2"),
        (
            {"inputs": [{"name": "click_item", "dtype": "int64", "shape": []}]},
            "'click_item', did you mean 'clicked_item'",
        ),
        ({"inputs": [{"name": "item_id", "dtype": "int64", "shape": ["pairs"]}]}, "names no user input"),
        ({"name": None}, "name must be text"),
    ],
)
def test_a_wrong_declaration_is_named(folder, change, message):
    content = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(ModelError, match=message):
        load_description(folder)


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    shutil.move(folder / "pair_head.pt2", tmp_path / "outside.pt2")
    (folder / "pair_head.pt2").symlink_to(tmp_path / "outside.pt2")
    with pytest.raises(ModelError, match="lies outside the folder"):
        load_description(folder)


def rewritten(source, target, change):
    """A copy of the archive with members changed: change(name, bytes) -> bytes; extra members by name."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


def edit(member, old, new):
    return lambda name, data: data.replace(old, new, 1) if name.endswith(member) else data


PICKLED = b'{"config": {"w": {"path_name": "weight_0", "use_pickle": true}}}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, data: b"pickle" if name.endswith("sample_inputs/model.pt") else data, "pickled sample inputs"),
        (edit("models/model.json", b"torch.ops.aten.stack.default", b"torch.hub.load"), "operator 'torch.hub.load'"),
        (edit("models/model.json", b"torch.ops.aten.stack.default", b"torch.os.system"), "operator 'torch.os.system'"),
        (edit("models/model.json", b"Symbol(", b"__import__("), "shape expression"),
        (lambda name, data: PICKLED if name.endswith("weights_config.json") else data, "tensor w is pickled"),
    ],
)
def test_a_program_that_would_run_code_is_refused(exported, tmp_path, change, message):
    bad = rewritten(exported / "pair_head.pt2", tmp_path / "bad.pt2", change)
    with pytest.raises(ModelError, match=message):
        check_program(bad)


@pytest.mark.parametrize(
    "member",
    [
        "data/aotinductor/model/x.so",
        "data/constants/custom_obj_0",
        "data/constants/opaque_obj_0",
        "data/weights/model.pt",
    ],
)
def test_an_archive_with_foreign_members_is_refused(exported, tmp_path, member):
    shutil.copy(exported / "pair_head.pt2", tmp_path / "bad.pt2")
    with zipfile.ZipFile(tmp_path / "bad.pt2", "a") as archive:
        archive.writestr(f"{archive.namelist()[0].split('/')[0]}/{member}", b"x")
    with pytest.raises(ModelError, match="not part of a plain exported program"):
        check_program(tmp_path / "bad.pt2")
    (tmp_path / "no.pt2").write_bytes(b"text")
    with pytest.raises(ModelError, match="is no exported program"):
        check_program(tmp_path / "no.pt2")


def test_export_names_what_breaks_the_contract(tmp_path):
    class OneOutput(nn.Module):
        def forward(self, state, user_index, items):
            return items["item_dense"]

    with pytest.raises(ModelError, match=r"must return \(embedding, logits\)"):
        export_split_model(Encoder(), OneOutput(), tmp_path, name="x", inputs=INPUTS, heads=["click"], dense=2)
    with pytest.raises(ModelError, match=r"logits must be \[pairs, 2\] for 2 heads"):
        export_split_model(Encoder(), Head(), tmp_path, name="x", inputs=INPUTS, heads=["a", "b"], dense=2)
    with pytest.raises(ModelError, match="dense is the width"):
        export_split_model(Encoder(), Head(), tmp_path, name="x", inputs=INPUTS, heads=["click"])
    assert not (tmp_path / "model.json").exists()


def test_hashed_ids_stay_in_range_at_the_ends_of_int64():
    rows = hashed(torch.tensor([-(2**63), 2**63 - 1, 0, -1, 1, 2**53, 2**53 + 1]), 512)
    assert rows.min() >= 1 and rows.max() <= 512 and rows[-1] != rows[-2]


def test_lack_of_memory_is_recognized():
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(ValueError("out of memory"))


def test_the_guide_to_bringing_a_model_works_as_written(tmp_path, monkeypatch):
    guide = Path(__file__).parents[2] / "docs" / "bring-your-own-model.md"
    blocks = [part.split("```")[0] for part in guide.read_text().split("```python\n")[1:]]
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    exec("\n".join(blocks), space)
    assert space["description"].version == load_description(tmp_path / "my-model").version
    assert check_model(tmp_path / "my-model") == []
