"""Decks of right and wrong losses, and what the proof says of each through its step."""

import audited_losses
import grid
import jax
import jax.numpy as jnp
import known_wrong
import numpy as np
import optax
import proved_models
from one_tower_programs import answers_of_step
from proved_models import Model

import towerjax as tj

TWO = tj.Mirrored(("cpu:0",), towers=2)


def answers_for(model, padded):
    """What is proved of each leaf that a train step of the loss merges."""
    remainder = "pad" if padded else "error"
    step = tj.build_train_step(
        model.loss_fn, optax.sgd(0.1), TWO, remainder=remainder, audit=False
    )
    how = {"rng": jax.random.key(0)}
    if model.local is not None:
        how["local"] = tj.TowerLocal(model.local, tj.Reduction.MEAN)
    return answers_of_step(step, step.init(model.params, **how), model.batch)


def losses_of(fns, params, batch):
    return {name: (lambda fn=fn: Model(params, batch, fn)) for name, fn in fns.items()}


def of_grid():
    """The operations of the grid, each in a network of its own."""
    h = 4
    shapes = {"w": (2, h, h), "b": (2, h), "t": (grid.IDS, h), "table": (grid.IDS, h)}
    shapes |= {"into": (grid.FEATURES, h), "out": (h, grid.CLASSES)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    params["z"] = np.zeros((h, h), np.complex64)
    batch = {"x": np.zeros((8, grid.FEATURES), np.float32)}
    batch |= {"y": np.zeros((8, grid.CLASSES), np.float32)}
    batch |= {"id": np.zeros(8, np.int32), "weight": np.zeros(8, np.float32)}

    def loss_of(name):
        def loss_fn(p, b, tower):
            view = grid.OfTower(None, b, tower, None)
            x = jnp.tanh(b["x"] @ p["into"])
            is_op = name in grid.OPS
            x = grid.OPS[name](p, x, view.batch) if is_op else getattr(view, name)(x)
            losses = ((x @ p["out"] - b["y"]) ** 2).sum(1)
            return tj.Weighted.mean(losses, b["weight"] * tower.weight)

        return loss_fn

    names = [*grid.OPS, "centred", "gathered", "normed"]
    return losses_of({name: loss_of(name) for name in names}, params, batch)


_KNOWN = known_wrong.PARAMS, known_wrong.batch()
_AUDITED = audited_losses.PARAMS, audited_losses.BATCH

RIGHT = {
    "known_wrong": losses_of(known_wrong.RIGHT, *_KNOWN),
    "audited_losses": losses_of(audited_losses.RIGHT, *_AUDITED),
    "grid": of_grid(),
    "models": proved_models.RIGHT,
}
WRONG = {
    "known_wrong": losses_of(known_wrong.WRONG, *_KNOWN),
    "audited_losses": losses_of(audited_losses.WRONG, *_AUDITED),
    "models": proved_models.WRONG,
}
WRONG_WHERE_PADDED = {
    "known_wrong": losses_of(known_wrong.WRONG_WHERE_PADDED, *_KNOWN),
    "audited_losses": losses_of(audited_losses.WRONG_WHERE_PADDED, *_AUDITED),
}

# Of the right ones: those that are wrong in truth, or of rows that are padded.
IN_TRUTH_WRONG = {"where_any", "a term a constant"}
UNMASKED = {
    "known_wrong": set(
        """of_all_towers at_least_one mean_of_rows surrogate dual
        stacked_totals in_two_sums two_means times_its_weight""".split()
    ),
    "audited_losses": set(),
    "grid": {"gathered"},
    "models": set(),
}
UNMASKED["known_wrong"] |= {"a term of a number of rows", "a term of rows, divided"}
UNMASKED["known_wrong"] |= {"a term of a tower's mean", "a term to the mean"}


def right_of(deck, padded):
    """The losses of a deck that are right."""
    wrong = IN_TRUTH_WRONG | (UNMASKED[deck] if padded else set())
    return {name: make for name, make in RIGHT[deck].items() if name not in wrong}


def wrong_of(deck, padded):
    """The losses of a deck that are wrong."""
    more = WRONG_WHERE_PADDED.get(deck, {}) if padded else {}
    return WRONG[deck] | more
