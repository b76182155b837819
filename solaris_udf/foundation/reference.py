"""The reference foundation model: a history transformer, an item tower and a target-aware pair head.

The user encoder runs transformers over the ordered clicked and shown sequences (with age, recency and action signals)
and projects keys and values for the pair head, so that all work on the history is done once per user. The pair head
lets the candidate attend to both sequences (deep interest network, Zhou et al. 2018), crosses the result with the item,
and feeds one logit per task. Click is P(click | shown), conversion P(conversion | click).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solaris_udf.foundation.features import FEATURES

INPUTS = tuple(FEATURES)
# Upper bounds in hours of the age buckets: minutes matter for fatigue, days for taste.
_AGES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 48.0, 96.0, 192.0, 384.0, 768.0)
_RECENT = 3
_MATCHES = _RECENT + 5
# The smoothed click rate of a user without events is 1/12; this centres its logarithm on 0.
_LOG_12 = 2.4849066


@dataclass(frozen=True)
class Size:
    """Dimensions. buckets: rows of the hashed item table; lengths: events read of each sequence."""

    dim: int
    heads: int
    clicked_layers: int
    shown_layers: int
    hidden: int
    buckets: int
    clicked_length: int
    shown_length: int


SIZES: dict[str, Size] = {
    "tiny": Size(
        dim=16, heads=2, clicked_layers=1, shown_layers=1, hidden=32, buckets=512, clicked_length=16, shown_length=16
    ),
    "demo": Size(
        dim=32, heads=2, clicked_layers=2, shown_layers=1, hidden=64, buckets=4096, clicked_length=24, shown_length=16
    ),
    "large": Size(
        dim=256,
        heads=8,
        clicked_layers=6,
        shown_layers=4,
        hidden=512,
        buckets=1 << 20,
        clicked_length=50,
        shown_length=50,
    ),
}


def hashed(ids: Tensor, buckets: int) -> Tensor:
    """Ids of any int64 value to rows 1..buckets, the same everywhere; 0 is left for "unknown"."""
    mixed = (ids ^ (ids >> 31)) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return torch.remainder(mixed ^ (mixed >> 32), buckets) + 1


class Catalogue(nn.Module):
    """Embeds an item by its hashed id, category and advertiser.

    In training, ids are dropped now and then, so that items never seen before, whose id says nothing, are no surprise.
    """

    def __init__(self, size: Size, id_dropout: float) -> None:
        super().__init__()
        self.item = nn.Embedding(size.buckets + 1, size.dim)
        self.category = nn.Embedding(1024 + 1, size.dim)
        self.advertiser = nn.Embedding(1024 + 1, size.dim)
        self.id_dropout = id_dropout
        for table in (self.item, self.category, self.advertiser):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, item: Tensor, category: Tensor, advertiser: Tensor) -> Tensor:
        rows = hashed(item, self.item.num_embeddings - 1)
        if self.training and self.id_dropout:
            rows = rows * (torch.rand(rows.shape, device=rows.device) >= self.id_dropout)
        found: Tensor = self.item(rows) + self.category(hashed(category, 1024) * (category != 0))
        found += self.advertiser(hashed(advertiser, 1024) * (advertiser != 0))
        return found


class Layer(nn.Module):
    """A pre-norm transformer layer. x [U, L, dim], mask [U, L] with at least one True per user."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        users, length, dim = x.shape
        qkv = self.qkv(self.before_attention(x)).view(users, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.out(seen.transpose(1, 2).reshape(users, length, dim))
        out: Tensor = x + self.mlp(self.before_mlp(x))
        return out


class Sequence(nn.Module):
    """One event sequence to contextual tokens: a start token (the user, always there), then the events."""

    ages: Tensor

    def __init__(self, size: Size, layers: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.age = nn.Embedding(len(_AGES) + 1, size.dim)
        self.rank = nn.Embedding(length, size.dim)
        self.action = nn.Embedding(2, size.dim)
        self.register_buffer("ages", torch.tensor(_AGES), persistent=False)
        self.layers = nn.ModuleList(Layer(size.dim, size.heads) for _ in range(layers))
        self.norm = nn.LayerNorm(size.dim)
        for table in (self.age, self.rank, self.action):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, start: Tensor, items: Tensor, age: Tensor, action: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """-> tokens [U, 1 + L, dim] and their mask."""
        # Recency rank: 0 for the latest event, whatever the padding.
        rank = (mask.sum(dim=1, keepdim=True) - torch.cumsum(mask, dim=1)).clamp(0, self.length - 1)
        tokens = items + self.age(torch.bucketize(age, self.ages)) + self.rank(rank) + self.action(action.long())
        x = torch.cat([start.unsqueeze(1), tokens], dim=1)
        seen = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
        for layer in self.layers:
            x = layer(x, seen)
        return self.norm(x), seen


class UserEncoder(nn.Module):
    """users -> state, a dict of tensors [U, ...]."""

    def __init__(self, size: Size, catalogue: Catalogue, id_dropout: float) -> None:
        super().__init__()
        self.catalogue = catalogue
        self.user = nn.Embedding(size.buckets + 1, size.dim)
        nn.init.normal_(self.user.weight, std=0.02)
        self.id_dropout = id_dropout
        self.counts = nn.Linear(4, size.dim)
        self.clicked = Sequence(size, size.clicked_layers, size.clicked_length)
        self.shown = Sequence(size, size.shown_layers, size.shown_length)
        self.recent = nn.Linear(_RECENT * size.dim, size.dim)
        self.clicked_kv, self.shown_kv = nn.Linear(size.dim, 2 * size.dim), nn.Linear(size.dim, 2 * size.dim)
        self.summary = nn.Linear(3 * size.dim, size.dim)

    def forward(self, users: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = hashed(users["user_id"], self.user.num_embeddings - 1)
        if self.training and self.id_dropout:
            rows = rows * (torch.rand(rows.shape, device=rows.device) >= self.id_dropout)
        start = self.user(rows) + self.counts(users["user_counts"])
        out: dict[str, Tensor] = {}
        for name, sequence, kv in (("clicked", self.clicked, self.clicked_kv), ("shown", self.shown, self.shown_kv)):
            mask = users[f"{name}_mask"]
            items = self.catalogue(users[f"{name}_item"], users[f"{name}_category"], users[f"{name}_advertiser"])
            action = users["shown_clicked"] if name == "shown" else mask
            tokens, seen = sequence(start, items, users[f"{name}_age_hours"], action, mask)
            out[f"{name}_key"], out[f"{name}_value"] = kv(tokens).chunk(2, dim=-1)
            out[f"{name}_seen"] = seen
            out[f"{name}_user"] = tokens[:, 0]
            if name == "clicked":
                # The last few clicks each in a place of their own: their order matters.
                last = mask.sum(dim=1, keepdim=True) - 1 - torch.arange(_RECENT, device=mask.device)
                at, there = last.clamp(min=0), last >= 0
                recent = torch.gather(items, 1, at.unsqueeze(-1).expand(-1, -1, items.shape[-1])) * there.unsqueeze(-1)
                out["recent"] = self.recent(recent.flatten(1))
                out["recent_category"] = torch.gather(users["clicked_category"], 1, at) * there
                out["clicked_items"] = users["clicked_item"]
                out["clicked_mask"] = mask
        out["user"] = self.summary(torch.cat([out.pop("clicked_user"), out.pop("shown_user"), out["recent"]], dim=-1))
        shown, clicked = torch.expm1(users["user_counts"][:, 2:]).unbind(dim=1)
        out["rate"] = torch.log((clicked + 1) / (shown + 12)).unsqueeze(1) + _LOG_12
        out["shown_items"], out["shown_mask"] = users["shown_item"], users["shown_mask"]
        out["shown_age"] = users["shown_age_hours"]
        return out


class PairHead(nn.Module):
    """state, user_index [P], items -> (pair representation [P, width], logits [P, T])."""

    def __init__(self, size: Size, catalogue: Catalogue, tasks: int, dense: int) -> None:
        super().__init__()
        self.catalogue, self.heads, self.dense_width = catalogue, size.heads, dense
        self.dense = nn.Linear(dense, size.dim) if dense else None
        self.item_age = nn.Linear(1, size.dim)
        self.tower = nn.Sequential(
            nn.LayerNorm(size.dim), nn.Linear(size.dim, size.dim), nn.GELU(), nn.Linear(size.dim, size.dim)
        )
        self.query = nn.Linear(size.dim, 2 * size.dim)
        self.mlp = nn.Sequential(
            nn.Linear(8 * size.dim + _MATCHES, 2 * size.hidden),
            nn.GELU(),
            nn.Linear(2 * size.hidden, size.hidden),
            nn.GELU(),
        )
        # The wide part (Cheng et al. 2016): what an item and a user do on average, learned long before the rest.
        self.wide = nn.Embedding(size.buckets + 1, tasks)
        nn.init.zeros_(self.wide.weight)
        self.width = size.hidden + tasks + 1
        self.logits = nn.Linear(self.width, tasks)
        with torch.no_grad():
            self.logits.weight[:, size.hidden : -1] = torch.eye(tasks)
            self.logits.weight[0, -1] = 1.0

    def forward(self, state: Mapping[str, Tensor], index: Tensor, items: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        raw = self.catalogue(items["item_id"], items["item_category"], items["item_advertiser"])
        raw = raw + self.item_age(torch.log1p(items["item_age_hours"]).unsqueeze(-1))
        if self.dense is not None:
            raw = raw + self.dense(items["item_dense"])
        item = raw + self.tower(raw)
        clicked_query, shown_query = self.query(item).chunk(2, dim=-1)
        clicked = self._attend(clicked_query, state, "clicked", index)
        shown = self._attend(shown_query, state, "shown", index)
        user, recent = state["user"].index_select(0, index), state["recent"].index_select(0, index)
        features = torch.cat(
            [
                item,
                user,
                clicked,
                shown,
                clicked * item,
                shown * item,
                user * item,
                recent * item,
                self._matches(state, index, items),
            ],
            dim=-1,
        )
        wide = self.wide(hashed(items["item_id"], self.wide.num_embeddings - 1))
        pair = torch.cat([self.mlp(features), wide, state["rate"].index_select(0, index)], dim=-1)
        return pair, self.logits(pair)

    def _attend(self, query: Tensor, state: Mapping[str, Tensor], name: str, index: Tensor) -> Tensor:
        pairs, dim = query.shape
        length = state[f"{name}_key"].shape[1]

        def split(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, index).view(pairs, length, self.heads, dim // self.heads).transpose(1, 2)

        query = query.view(pairs, 1, self.heads, dim // self.heads).transpose(1, 2)
        seen = F.scaled_dot_product_attention(
            query,
            split(state[f"{name}_key"]),
            split(state[f"{name}_value"]),
            attn_mask=state[f"{name}_seen"].index_select(0, index)[:, None, None, :],
        )
        return seen.reshape(pairs, dim)

    def _matches(self, state: Mapping[str, Tensor], index: Tensor, items: Mapping[str, Tensor]) -> Tensor:
        """Exact matches that embeddings only approximate: this very item before, and the last clicked categories."""
        item = items["item_id"].unsqueeze(1)
        shown = (state["shown_items"].index_select(0, index) == item) & state["shown_mask"].index_select(0, index)
        age = state["shown_age"].index_select(0, index)
        clicked = (state["clicked_items"].index_select(0, index) == item) & state["clicked_mask"].index_select(0, index)
        category = (state["recent_category"].index_select(0, index) == items["item_category"].unsqueeze(1)).float()
        counts = [(shown & (age < 24)).sum(1), (shown & (age < 2)).sum(1), shown.sum(1), clicked.sum(1)]
        known = (items["item_category"] != 0).float().unsqueeze(1)
        return torch.cat([category * known, known, torch.log1p(torch.stack(counts, dim=1).float())], dim=1)


class ReferenceModel(nn.Module):
    """Encoder and head with the shared catalogue; forward gives (pair representation, logits)."""

    def __init__(self, size: Size, tasks: int, dense: int, id_dropout: float = 0.0) -> None:
        super().__init__()
        catalogue = Catalogue(size, id_dropout / 3)
        self.encoder = UserEncoder(size, catalogue, id_dropout)
        self.head = PairHead(size, catalogue, tasks, dense)

    def forward(self, users: Mapping[str, Tensor], index: Tensor, items: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        pair, logits = self.head(self.encoder(users), index, items)
        return pair, logits
