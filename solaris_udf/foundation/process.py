"""One training process: reads the local files, picks its device, trains."""

import os
from pathlib import Path
from typing import Any

import torch

from solaris_udf.foundation.items import ItemTable
from solaris_udf.foundation.reference import SIZES
from solaris_udf.foundation.samples import read_samples
from solaris_udf.foundation.training import Plan, Progress, Trained, silent, train


def train_files(
    *,
    users: str,
    items: str,
    folder: str,
    plan: dict[str, Any],
    conversions: bool,
    mature_before: int,
    threads: int = 0,
    progress: Progress | None = None,
    distributed: bool = False,
) -> Trained | None:
    """train() on the files at `users` (parquet, see read_samples) and `items`, with Plan(**plan).

    distributed: this is one of several processes started by torchrun or TorchDistributor; only rank 0 gets the result.
    """
    made = Plan(**plan)
    size = SIZES[made.size]
    cuda = torch.cuda.is_available()
    if threads:
        torch.set_num_threads(threads)
    rank, workers, device = 0, 1, "cuda:0" if cuda else "cpu"
    if distributed:
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
        rank, workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu"
    try:
        samples = read_samples(
            users,
            ItemTable.open(items),
            {"clicked": size.clicked_length, "shown": size.shown_length},
            conversions=conversions,
            mature_before=mature_before,
        )
        return train(
            samples,
            made,
            Path(folder),
            name=f"reference-{made.size}",
            device=device,
            progress=progress or silent,
            rank=rank,
            workers=workers,
        )
    finally:
        if distributed:
            torch.distributed.destroy_process_group()
