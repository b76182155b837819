"""The autoencoder that turns the model's pair representation into the short vector that is stored."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Projection(nn.Module):
    """hidden [n, h] -> code [n, dim] in (-1, 1), and back to hidden and logits.

    Bounded, so that no outlier can overflow float16 or ruin an int8 scale. Inputs are standardized by stored
    statistics. The logits are reconstructed too: of all that the representation holds, they are what a ranker is after.
    """

    mean: Tensor
    scale: Tensor
    logit_mean: Tensor
    logit_scale: Tensor

    def __init__(self, hidden: int, tasks: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(hidden))
        self.register_buffer("scale", torch.ones(hidden))
        self.register_buffer("logit_mean", torch.zeros(tasks))
        self.register_buffer("logit_scale", torch.ones(tasks))
        self.encoder = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, dim), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(dim, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden + tasks))

    def fit_scales(self, hidden: Tensor, logits: Tensor) -> None:
        """Takes mean and deviation from a sample; a constant unit keeps scale 1."""
        for values, mean, scale in ((hidden, self.mean, self.scale), (logits, self.logit_mean, self.logit_scale)):
            deviation = values.std(dim=0)
            mean.copy_(values.mean(dim=0))
            scale.copy_(torch.where(deviation > 1e-4, deviation, torch.ones_like(deviation)))

    def forward(self, hidden: Tensor) -> Tensor:
        """The code."""
        code: Tensor = self.encoder((hidden - self.mean) / self.scale)
        return code

    def loss(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Mean squared error of the standardized hidden units plus that of the logits."""
        target = torch.cat([(hidden - self.mean) / self.scale, (logits - self.logit_mean) / self.logit_scale], dim=1)
        rebuilt = self.decoder(self(hidden))
        width = hidden.shape[1]
        return F.mse_loss(rebuilt[:, :width], target[:, :width]) + F.mse_loss(rebuilt[:, width:], target[:, width:])


class ProjectedHead(nn.Module):
    """A pair head whose embedding is the projection's code: what is exported."""

    def __init__(self, head: nn.Module, projection: Projection) -> None:
        super().__init__()
        self.head, self.projection = head, projection

    def forward(self, state: Mapping[str, Tensor], index: Tensor, items: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, logits = self.head(state, index, items)
        return self.projection(hidden), logits
