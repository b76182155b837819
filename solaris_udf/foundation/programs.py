"""Loading torch.export programs without running anything that a file brings along.

torch.export.load (checked in 2.13) unpickles without limits, loads shared libraries and evaluates text when an archive
asks for it: tensors marked `use_pickle`, custom and opaque constants, the legacy .pt members and the old zip format,
sample inputs, AOTInductor libraries, operator names (any attribute below `torch`), shape expressions (sympy's eval) and
guards (exec). A program written by our export helper needs none of it: weights are raw bytes, sample inputs are left
out. So an archive is read here first, and anything beyond raw tensors and aten operators is refused.
"""

import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from solaris_udf.foundation.features import ModelError, one_line

_MEMBERS = re.compile(
    r"(archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)|models/model\.json"
    r"|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt)"
)
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims)\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+"
    r"|torch\.ops\.higher_order\.(cond|while_loop|scan|associative_scan|wrap_with_set_grad_enabled|wrap_with_autocast)"
    r"|torch\.sym_(int|float|max|min|not|ite|sqrt|sum)|torch\._sym_sqrt"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem)"
    r"|math\.(ceil|floor|trunc|sqrt)"
)
_EXPRESSION_WORDS = {
    "Symbol",
    "Integer",
    "Float",
    "Rational",
    "Add",
    "Mul",
    "Pow",
    "Max",
    "Min",
    "Mod",
    "PythonMod",
    "FloorDiv",
    "CleanDiv",
    "CeilDiv",
    "IntTrueDiv",
    "FloatTrueDiv",
    "ModularIndexing",
    "Where",
    "Eq",
    "Ne",
    "Equality",
    "Unequality",
    "And",
    "Or",
    "Not",
    "StrictLessThan",
    "LessThan",
    "StrictGreaterThan",
    "GreaterThan",
    "ToFloat",
    "TruncToInt",
    "CeilToInt",
    "FloorToInt",
    "true",
    "false",
    "True",
    "False",
    "integer",
    "positive",
    "nonnegative",
    "real",
    "precision",
}
_EXPRESSION = re.compile(r"[\w\s()+\-*/%,=<>&|~!']*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_SYMBOL = re.compile(r"[su]\d+|zuf\d+|zf\d+")


def check_program(path: Path) -> None:
    """Raises ModelError unless the archive holds only raw tensors and a graph of plain operators."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            if len(names) != len(archive.namelist()):
                # Readers differ in which of two members of one name they take: the one checked might not be loaded.
                raise ModelError(f"{path}: holds two members of one name")
            for name in names:
                if not _MEMBERS.fullmatch(name):
                    raise ModelError(f"{path}: holds {name!r}, which is not part of a plain exported program")
            for kind in ("weights", "constants"):
                config = json.loads(archive.read(names[f"data/{kind}/model_{kind}_config.json"]))["config"]
                for tensor, payload in config.items():
                    if payload.get("use_pickle") is not False or not _PAYLOAD.fullmatch(payload["path_name"]):
                        raise ModelError(f"{path}: tensor {tensor} is pickled; save it as a plain tensor")
            if archive.getinfo(names["data/sample_inputs/model.pt"]).file_size:
                raise ModelError(f"{path}: holds pickled sample inputs; set program.example_inputs = None")
            graph = json.loads(archive.read(names["models/model.json"]))
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: is no exported program ({one_line(error)})") from None
    for key, value in _fields(graph):
        if key == "target" and not (isinstance(value, str) and _OPERATOR.fullmatch(value)):
            raise ModelError(f"{path}: operator {value!r} is not allowed; use aten operators only")
        if key == "expr_str" and not _plain_expression(value):
            raise ModelError(f"{path}: shape expression {value!r} is not allowed")
        if key == "source_fn_stack" or key in ("as_custom_obj", "as_opaque_obj"):
            raise ModelError(f"{path}: {key} is not allowed in a plain exported program")


def load_program(path: Path) -> Any:
    """The checked program as a torch.export.ExportedProgram. Raises ModelError if it is refused or damaged."""
    import torch

    check_program(path)
    try:
        return torch.export.load(path)
    except Exception as error:
        raise ModelError(f"{path}: can't be loaded by torch {torch.__version__} ({one_line(error)})") from error


def check_inputs(path: Path, program: Any, **arguments: Any) -> None:
    """Raises ModelError unless the program takes these arguments by position: tensors, or dicts or tuples of them.

    Names, dtypes and numbers of axes must be the same; sizes are callable_of's to check.
    """
    import torch
    from torch.utils import _pytree as pytree

    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    taken = [values.get(name, name) for name in program.graph_signature.user_inputs]
    positional, named = pytree.tree_unflatten(taken, program.call_spec.in_spec)
    if named or len(positional) != len(arguments):
        raise ModelError(f"{path}: the program must take ({', '.join(arguments)}) by position, and nothing else")

    def kinds(trees: Iterable[Any]) -> dict[str, str]:
        """Dtype and axes of each tensor, by its place in the arguments: users['clicked_item']."""
        found = {}
        for argument, tree in zip(arguments, trees, strict=True):
            for place, value in pytree.tree_flatten_with_path(tree)[0]:
                kind = "no tensor"
                if isinstance(value, torch.Tensor):
                    kind = f"{str(value.dtype).removeprefix('torch.')} of {value.ndim} axes"
                found[argument + pytree.keystr(place)] = kind
        return found

    given, wanted = kinds(arguments.values()), kinds(positional)
    wrong = [f"lacks {name}" for name in given if name not in wanted]
    wrong += [f"wants {name}, which it does not get" for name in wanted if name not in given]
    wrong += [
        f"takes {name} as {wanted[name]}, but gets {kind}"
        for name, kind in given.items()
        if name in wanted and wanted[name] != kind
    ]
    if wrong:
        raise ModelError(f"{path}: the program {'; '.join(wrong)}; export it with the inputs that model.json names")


def callable_of(program: Any, device: str, compiled: bool = False) -> Callable[..., Any]:
    """The program as a function on a device, for inference. Its stored guards are code, so they are left out.

    torch's own check of each input solves equations and takes longer than a small model's batch. What it checks beyond
    the names (which the graph itself reads) are the sizes, and those are compared here: ModelError for a size that the
    program was not exported for. compiled: torch.compile it.
    """
    import torch
    from torch.fx._pytree import tree_flatten_spec

    if device != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    module = program.module(check_guards=False)
    module.validate_inputs = False
    limits, in_spec = _size_limits(program), module._in_spec
    run = torch.compile(module, dynamic=True) if compiled else module

    def call(*arguments: Any) -> Any:
        for (name, axes), tensor in zip(limits, tree_flatten_spec((list(arguments), {}), in_spec), strict=True):
            if any(not low <= tensor.shape[axis] <= high for axis, low, high in axes):
                raise ModelError(
                    f"input {name} is {list(tensor.shape)}, but the program is limited to "
                    + ", ".join(f"{low} to {high} on axis {axis}" for axis, low, high in axes)
                    + "; export it with dynamic sizes"
                )
        return run(*arguments)

    return call


def peak_bytes(program: Any, *arguments: Any) -> tuple[Any, int]:
    """What the program gives on the CPU, and the most bytes of inputs and values that were needed at one time.

    Weights don't count, nor what an operator takes inside.
    """
    import torch
    from torch.utils import _pytree as pytree

    class Measured(torch.fx.Interpreter):
        peak = 0

        def run_node(self, node: Any) -> Any:
            found = super().run_node(node)
            values = [value for of, value in self.env.items() if of.op != "get_attr"]
            tensors = [each for each in pytree.tree_leaves([*values, found]) if isinstance(each, torch.Tensor)]
            # Views share their storage, and a value that lives on is in env once more.
            storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
            self.peak = max(self.peak, sum(storages.values()) if node.op != "get_attr" else 0)
            return found

    with torch.inference_mode():
        measured = Measured(program.module(check_guards=False))
        return measured.run(*arguments), measured.peak


def _size_limits(program: Any) -> list[tuple[str, list[tuple[int, int, int]]]]:
    """(input, [(axis, least, most)]) of each input, in order; axes of any size are left out."""
    found = []
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in program.graph_signature.user_inputs:
            continue
        axes = []
        for axis, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                axes.append((axis, size, size))
                continue
            span = program.range_constraints.get(size.node.expr)
            # Export notes a least size of 2 for any size, 0 and 1 included.
            low = 0 if span is None or span.lower <= 2 else int(span.lower)
            high = sys.maxsize if span is None or span.upper >= sys.maxsize else int(span.upper)
            if (low, high) != (0, sys.maxsize):
                axes.append((axis, low, high))
        found.append((node.name, axes))
    return found


def _plain_expression(value: Any) -> bool:
    if not isinstance(value, str) or not _EXPRESSION.fullmatch(value):
        return False
    return all(word in _EXPRESSION_WORDS or _SYMBOL.fullmatch(word) for word in _WORD.findall(value))


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Every (key, value) of a JSON value, at any depth."""
    stack = [value]
    while stack:
        current = stack.pop()
        if isinstance(current, dict):
            for key, inner in current.items():
                yield key, inner
                stack.append(inner)
        elif isinstance(current, list):
            stack.extend(current)
