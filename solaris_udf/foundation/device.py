"""Where a model computes: how arrays get there and how results come back."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from solaris_udf.foundation.users import Array

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Device:
    """A torch device by name: cpu, cuda:0, ... half: autocast to half precision, on CUDA only.

    On a GPU nothing here waits: copies go through pinned memory, and `fetched` returns before the work is done.
    """

    name: str = "cpu"
    half: bool = False

    @property
    def cuda(self) -> bool:
        return self.name.startswith("cuda")

    def tensor(self, values: Array) -> "Tensor":
        """The array on the device; on the CPU it shares the array's memory."""
        import torch

        found = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        return found.pin_memory().to(self.name, non_blocking=True) if self.cuda else found

    def autocast(self) -> AbstractContextManager[Any]:
        import torch

        return torch.autocast("cuda", dtype=torch.float16) if self.half and self.cuda else nullcontext()

    def fetched(self, *tensors: "Tensor") -> Callable[[], tuple[Array, ...]]:
        """Starts copying the tensors back as float32; the function that it returns waits for them."""
        import torch

        # A copy to the CPU that does not block lands in pinned memory, and is complete once the event has come.
        copies = [tensor.float().to("cpu", non_blocking=self.cuda) for tensor in tensors]
        event = torch.cuda.Event() if self.cuda else None  # type: ignore[no-untyped-call]
        if event is not None:
            event.record()

        def wait() -> tuple[Array, ...]:
            if event is not None:
                event.synchronize()
            return tuple(copy.numpy() for copy in copies)

        return wait
