"""The ground truth: how likely a click is, and a conversion after it."""

import numpy as np

from solaris_udf.world.draws import Float64, Int64, fold, key, normal, uniform
from solaris_udf.world.items import Items
from solaris_udf.world.parameters import DIM, WorldParameters
from solaris_udf.world.users import Users


class Truth:
    """The true probabilities of a world. They are what no model is told.

    taste: [DIM, r] of each request's user; item: numbers [r, w]; user: places in `users` [r].
    """

    def __init__(self, parameters: WorldParameters) -> None:
        self.rules = parameters.rules
        root = key(parameters.seed, "truth")
        dims = np.arange(DIM)
        # Three further views of a taste, dimensions permuted and flipped, so that more than one product meets the item.
        self.views = [
            (np.argsort(fold(fold(root, view), dims)), np.sign(uniform(fold(fold(root, 10 + view), dims)) - 0.5))
            for view in range(3)
        ]
        categories = self.rules.categories
        effects = normal(fold(fold(fold(root, 20), np.arange(categories))[:, None], np.arange(categories)))
        effects = self.rules.order_mean + self.rules.order_sd * effects
        # Row -1 is "nothing clicked yet".
        self.order_effects = np.concatenate([effects, np.zeros((1, categories))])

    def match(self, taste: Float64, vector: np.ndarray) -> tuple[Float64, Float64, Float64]:
        """Of tastes [DIM, r] and items' vectors [DIM, r, w]: the inner product that a two-tower retrieval would find,
        the click's match and the conversion's, each [r, w] with a standard deviation near 1."""
        linear = dot(taste, vector)
        second, third, fourth = (dot(taste[order] * signs[:, None], vector) for order, signs in self.views)
        click = 0.8 * np.tanh(linear) + 0.9 * np.sin(1.5 * second) + 0.6 * linear * np.tanh(third)
        conversion = np.sin(1.5 * fourth) + 0.7 * second * np.tanh(linear) + 0.3 * third
        return linear, click, conversion

    def click(
        self,
        users: Users,
        user: Int64,
        items: Items,
        item: Int64,
        match: Float64,
        last: Int64,
        times_shown: Int64,
        surface: Int64,
    ) -> Float64:
        """P(click if shown) [r, w]. last: categories of the last clicks [r, 3], newest first, -1 for none;
        times_shown: of the pair in the last 24 h [r, w]; surface [r]."""
        rules = self.rules
        category = items.category[item]
        order = np.zeros(item.shape)
        for place, decay in enumerate(rules.order_decay):
            order += decay * self.order_effects[last[:, place, None], category]
        request = rules.intercept + users.bias[user] + np.array(rules.surface_effects)[surface]
        logit = (
            request[:, None]
            + items.quality[item]
            + rules.taste_weight * match
            + rules.order_weight * order
            - rules.fatigue * times_shown
        )
        return sigmoid(logit)

    def conversion(self, users: Users, user: Int64, items: Items, item: Int64, match: Float64) -> Float64:
        """P(conversion if clicked) [r, w]."""
        rules = self.rules
        request = rules.conversion_intercept + users.conversion_bias[user]
        return sigmoid(request[:, None] + items.conversion_quality[item] + rules.conversion_weight * match)


def dot(taste: np.ndarray, vector: np.ndarray) -> Float64:
    """Inner products over DIM, divided by sqrt(DIM): [DIM, r] with [DIM, r, w] -> [r, w].

    Summed one dimension after the other: a matrix product rounds differently for other numbers of rows, and a world
    must not depend on how its users are cut.
    """
    total: Float64 = taste[0][:, None] * vector[0]
    for dim in range(1, DIM):
        total = total + taste[dim][:, None] * vector[dim]
    scaled: Float64 = total / np.sqrt(DIM)
    return scaled


def sigmoid(logit: Float64) -> Float64:
    out: Float64 = 1.0 / (1.0 + np.exp(-logit))
    return out
