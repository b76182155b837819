"""A model of two lines and its whole, for tests of model folders."""

import torch
from torch import nn

INPUTS = ("clicked_item", "clicked_mask", "item_id", "item_dense")


class Encoder(nn.Module):
    def forward(self, users):
        return (users["clicked_item"] * users["clicked_mask"]).sum(dim=1)


class Head(nn.Module):
    """Embedding: (sum of clicked ids mod 10, first dense feature); logit: their sum."""

    def forward(self, state, user_index, items):
        both = torch.stack([(state[user_index] % 10).float(), items["item_dense"][:, 0]], dim=1)
        return both, both.sum(dim=1, keepdim=True)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), Head()

    def forward(self, users, user_index, items):
        return self.head(self.encoder(users), user_index, items)
