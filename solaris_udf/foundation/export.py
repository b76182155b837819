"""From an nn.Module to a model folder."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from solaris_udf.foundation.contract import (
    DEFAULT_LENGTH,
    DESCRIPTION_FILE,
    SPLIT_FILES,
    UNSPLIT_FILES,
    Description,
    write_description,
)
from solaris_udf.foundation.features import SEQUENCES, ModelError, check_names
from solaris_udf.foundation.trial import trial_items, trial_users

# Sizes to trace with: all different and above 1, since torch takes 0 and 1 for constants. What changes between the two
# is an axis of any size, all others are the model's own.
_USERS, _PAIRS, _TRACE_LENGTHS = 3, 7, {"clicked": 16, "shown": 24}
_OTHER_USERS, _OTHER_PAIRS, _OTHER_LENGTHS = 5, 11, {"clicked": 8, "shown": 32}


def export_split_model(
    user_encoder: Any,
    pair_head: Any,
    folder: str | Path,
    *,
    name: str,
    inputs: Sequence[str],
    heads: Sequence[str],
    dense: int = 0,
    lengths: Mapping[str, int] | None = None,
) -> Description:
    """Writes two modules as a model folder and returns its description.

    user_encoder.forward(users: dict of the user inputs) -> state: a tensor, or a dict or tuple of tensors [users, ...].
    pair_head.forward(state, user_index: int64 [P], items: dict of the item inputs) -> (embedding [P, d], logits [P, T])

    inputs: names from the feature catalogue. heads: names of the T logits. dense: width of item_dense, if it is an
    input. lengths: how many clicked and shown events the model looks at. Costs in FLOPs are counted at full length.
    Raises ModelError for unknown inputs and for outputs that break the contract.
    """
    return _export([user_encoder, pair_head], SPLIT_FILES, Path(folder), name, inputs, heads, dense, lengths)


def export_unsplit_model(
    pair_model: Any,
    folder: str | Path,
    *,
    name: str,
    inputs: Sequence[str],
    heads: Sequence[str],
    dense: int = 0,
    lengths: Mapping[str, int] | None = None,
) -> Description:
    """export_split_model for a model that can't be split: forward(users, user_index, items) -> (embedding, logits).

    The user part runs again for each batch of pairs, so inference is slower.
    """
    return _export([pair_model], UNSPLIT_FILES, Path(folder), name, inputs, heads, dense, lengths)


def _export(
    modules: list[Any],
    files: Sequence[str],
    folder: Path,
    name: str,
    inputs: Sequence[str],
    heads: Sequence[str],
    dense: int,
    lengths: Mapping[str, int] | None,
) -> Description:
    import torch

    features = check_names(inputs)
    if ("item_dense" in inputs) != bool(dense):
        raise ModelError("dense is the width of input item_dense: give both or neither")
    modules = [module.eval().cpu().requires_grad_(False) for module in modules]

    def arguments(users: int, pairs: int, sizes: Mapping[str, int]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        def tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
            return {key: torch.from_numpy(value) for key, value in arrays.items()}

        return (
            tensors(trial_users(features, users, sizes)),
            torch.arange(pairs) % users,
            tensors(trial_items(features, pairs, dense)),
        )

    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION_FILE).unlink(missing_ok=True)
    with torch.no_grad():
        users, user_index, items = arguments(_USERS, _PAIRS, _TRACE_LENGTHS)
        other_users, *others = arguments(_OTHER_USERS, _OTHER_PAIRS, _OTHER_LENGTHS)
        first, other = (modules[0](of) if len(modules) == 2 else of for of in (users, other_users))
        dim = _check_outputs(modules[-1](first, user_index, items), _PAIRS, len(heads))
        if len(modules) == 2:
            _save(modules[0], (users,), (other_users,), folder / files[0])
        _save(modules[-1], (first, user_index, items), (other, *others), folder / files[-1])
        full = {sequence: (lengths or {}).get(sequence, DEFAULT_LENGTH) for sequence in SEQUENCES}
        users, user_index, items = arguments(2, 4, full)
        per_user = _flops(modules[0], (users,)) / 2 if len(modules) == 2 else 0.0
        first = modules[0](users) if len(modules) == 2 else users
        per_pair = _flops(modules[-1], (first, user_index, items)) / 4
    return write_description(
        folder,
        name=name,
        embedding_dim=dim,
        inputs=inputs,
        heads=heads,
        dense=dense,
        lengths=lengths,
        flops_per_user=per_user,
        flops_per_pair=max(per_pair, 1.0),
    )


def _check_outputs(outputs: Any, pairs: int, heads: int) -> int:
    """The embedding's dimension. Raises ModelError unless outputs are (embedding [P, d], logits [P, T])."""
    if not isinstance(outputs, tuple) or len(outputs) != 2:
        raise ModelError(f"the pair head must return (embedding, logits), not {type(outputs).__name__}")
    embedding, logits = outputs
    if embedding.ndim != 2 or embedding.shape[0] != pairs:
        raise ModelError(f"the embedding must be [pairs, d], not {list(embedding.shape)} for {pairs} pairs")
    if tuple(logits.shape) != (pairs, heads):
        raise ModelError(f"logits must be [pairs, {heads}] for {heads} heads, not {list(logits.shape)}")
    return int(embedding.shape[1])


def _save(module: Any, arguments: tuple[Any, ...], others: tuple[Any, ...], path: Path) -> None:
    """Exports the module as called with arguments; axes in which others differ may have any size."""
    import torch
    from torch.utils import _pytree as pytree

    def dynamic_axes(tensor: Any, other: Any) -> dict[int, Any]:
        return {axis: torch.export.Dim.AUTO for axis in range(tensor.ndim) if tensor.shape[axis] != other.shape[axis]}

    dynamic = pytree.tree_map(dynamic_axes, arguments, others)
    program = torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=False)
    # Sample inputs are the one thing in a plain program that torch pickles.
    program.example_inputs = None
    for graph_module in program.graph_module.modules():
        for node in graph_module.graph.nodes:
            # Source paths and line numbers: they would make the hash depend on where the code is installed.
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node"):
                node.meta.pop(key, None)
    partial = path.with_name(f".partial-{path.name}")
    torch.export.save(program, partial)
    shutil.move(partial, path)


def _flops(module: Any, arguments: tuple[Any, ...]) -> float:
    """Matrix-product FLOPs of one call."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        module(*arguments)
    return float(counter.get_total_flops())
