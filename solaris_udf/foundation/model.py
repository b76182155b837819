"""A model ready to run: two functions on numpy arrays, so that inference and its tests need not know torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solaris_udf.foundation.contract import SPLIT_FILES, UNSPLIT_FILES, Description, load_description
from solaris_udf.foundation.device import Device
from solaris_udf.foundation.features import ModelError, one_line
from solaris_udf.foundation.programs import callable_of, check_inputs, load_program, peak_bytes
from solaris_udf.foundation.trial import trial_items, trial_users
from solaris_udf.foundation.users import Array

State = Any
Inputs = Mapping[str, Array]
# Users and pairs that memory is measured with.
_USERS, _PAIRS = 4, 16


@dataclass(frozen=True)
class Model:
    """encode_users(user inputs [U, ...]) -> state, any object; called once per group of users.

    start_pairs(state, user_index int64 [P], item inputs [P, ...]) starts a batch of the group's pairs and returns a
    function that waits for its (embedding float32 [P, d], logits float32 [P, T]). A GPU computes meanwhile; on a CPU
    the work is done when start_pairs returns. Lack of memory is raised by start_pairs.

    user_bytes, pair_bytes: memory that a user and a pair take while they are computed, at full history length; 0 if
    not known.
    """

    description: Description
    encode_users: Callable[[Inputs], State]
    start_pairs: Callable[[State, Array, Inputs], Callable[[], tuple[Array, ...]]]
    user_bytes: float = 0.0
    pair_bytes: float = 0.0


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
    torch.compile the programs. Raises ModelError, also for programs whose inputs are not those of model.json.
    """
    import torch

    description = load_description(folder, roots)
    if threads:
        torch.set_num_threads(threads)
    place = Device(device, half)
    files = [Path(folder) / file for file in (SPLIT_FILES if description.split else UNSPLIT_FILES)]
    loaded = [load_program(file) for file in files]
    try:
        user_bytes, pair_bytes = _memory(files, loaded, description)
    except Exception as error:
        if isinstance(error, ModelError) or is_out_of_memory(error):
            raise
        raise ModelError(
            f"{folder}: the programs fail on {_USERS} users of full history length and {_PAIRS} pairs; are their sizes "
            f"fixed? export them with dynamic axes ({one_line(error)})"
        ) from error
    programs = [callable_of(program, device, compiled) for program in loaded]

    def tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
        return {name: place.tensor(values) for name, values in inputs.items()}

    def encode_users(users: Inputs) -> State:
        with torch.inference_mode(), place.autocast():
            return programs[0](tensors(users)) if description.split else tensors(users)

    def start_pairs(state: State, user_index: Array, items: Inputs) -> Callable[[], tuple[Array, ...]]:
        with torch.inference_mode(), place.autocast():
            return place.fetched(*programs[-1](state, place.tensor(user_index), tensors(items)))

    return Model(description, encode_users, start_pairs, user_bytes, pair_bytes)


def _memory(files: Sequence[Path], programs: Sequence[Any], description: Description) -> tuple[float, float]:
    """Bytes of a user and of a pair at full length, measured on a few of each on the CPU, in full precision.

    Raises ModelError if a program's inputs are others than these.
    """
    import torch

    def tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(values) for name, values in inputs.items()}

    users = tensors(trial_users(description.inputs, _USERS, description.lengths))
    items = tensors(trial_items(description.inputs, _PAIRS, description.dense))
    index = torch.arange(_PAIRS) % _USERS
    if description.split:
        check_inputs(files[0], programs[0], users=users)
        state, user_bytes = peak_bytes(programs[0], users)
        check_inputs(files[1], programs[1], state=state, user_index=index, items=items)
    else:
        state, user_bytes = users, 0
        check_inputs(files[0], programs[0], users=users, user_index=index, items=items)
    _, pair_bytes = peak_bytes(programs[-1], state, index, items)
    return user_bytes / _USERS, pair_bytes / _PAIRS


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may help. torch raises its own class on CUDA, plain RuntimeErrors on a CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
