"""A model ready to run: two functions on numpy arrays, so that inference and its tests need not know torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from solaris_udf.foundation.contract import SPLIT_FILES, UNSPLIT_FILES, Description, load_description
from solaris_udf.foundation.programs import callable_of, load_program
from solaris_udf.foundation.users import Array

State = Any
Inputs = Mapping[str, Array]


@dataclass(frozen=True)
class Model:
    """encode_users(user inputs [U, ...]) -> state, any object; called once per group of users.

    embed_pairs(state, user_index int64 [P], item inputs [P, ...]) -> (embedding float32 [P, d], logits float32 [P, T]);
    called for each batch of the group's pairs.
    """

    description: Description
    encode_users: Callable[[Inputs], State]
    embed_pairs: Callable[[State, Array, Inputs], tuple[Array, Array]]


Loader = Callable[[], Model]


def load_model(
    folder: str | Path,
    *,
    device: str = "cpu",
    threads: int = 0,
    half: bool = False,
    compiled: bool = False,
    roots: Sequence[str | Path] | None = None,
) -> Model:
    """Verifies the folder, then loads its programs onto a device (cpu, cuda:0, ...).

    threads: torch's threads in this process, 0 leaves them. half: autocast to half precision, on CUDA only. compiled:
    torch.compile the programs. Raises ModelError.
    """
    import torch

    description = load_description(folder, roots)
    if threads:
        torch.set_num_threads(threads)
    cuda = device.startswith("cuda")
    files = SPLIT_FILES if description.split else UNSPLIT_FILES
    programs = [callable_of(load_program(Path(folder) / file), device) for file in files]
    if compiled:
        programs = [torch.compile(program, dynamic=True) for program in programs]

    def tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
        return {name: tensor(values) for name, values in inputs.items()}

    def tensor(values: Array) -> torch.Tensor:
        found = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        return found.pin_memory().to(device, non_blocking=True) if cuda else found

    def call(program: Any, *arguments: Any) -> Any:
        with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16, enabled=half and cuda):
            return program(*arguments)

    def encode_users(users: Inputs) -> State:
        return call(programs[0], tensors(users)) if description.split else tensors(users)

    def embed_pairs(state: State, user_index: Array, items: Inputs) -> tuple[Array, Array]:
        embedding, logits = call(programs[-1], state, tensor(user_index), tensors(items))
        return embedding.float().cpu().numpy(), logits.float().cpu().numpy()

    return Model(description, encode_users, embed_pairs)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may help. torch raises its own class on CUDA, plain RuntimeErrors on a CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
