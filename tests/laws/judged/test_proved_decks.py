"""Through real steps no wrong loss of the decks is proved, and most right ones are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from proved_decks import (
    IN_TRUTH_WRONG,
    RIGHT,
    UNMASKED,
    WRONG,
    answers_for,
    right_of,
    wrong_of,
)

import towerjax as tj

pytestmark = pytest.mark.slow

# Right, and not proved: each has its reason in docs/evidence.md.
UNKNOWN = {"mean_of_rows", "gnn"}
UNKNOWN_PADDED = UNKNOWN | {"clip", "siglip", "simclr"}
# Groups of rows, of which there are none unless towers have whole ones.
UNKNOWN_PADDED |= {"of_neighbours", "pairs_of_neighbours"}


def unproved(makes, padded):
    """The names of the losses of which a leaf is not proved."""
    names = set()
    for name, make in makes.items():
        if any(x.says != "proved" for x in answers_for(make(), padded)):
            names.add(name)
    return names


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("deck", RIGHT)
def test_right_losses_are_proved(deck, padded):
    right = right_of(deck, padded)
    known = UNKNOWN_PADDED if padded else UNKNOWN
    assert unproved(right, padded) == known & right.keys()


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("deck", WRONG)
def test_no_wrong_loss_is_proved(deck, padded):
    wrong = wrong_of(deck, padded)
    assert unproved(wrong, padded) == wrong.keys()


def trained(model, towers, sizes):
    """The loss and the parameters of a step of this many towers, after others."""
    strategy = tj.Mirrored(("cpu:0",), towers=towers)
    how = {"remainder": "pad", "audit": False, "on_nonfinite": "ignore"}
    step = tj.build_train_step(model.loss_fn, optax.sgd(1.0), strategy, **how)
    for size in sizes:
        rows = jax.tree.map(lambda x, size=size: x[:size], model.batch)
        state = step.init(model.params, rng=jax.random.key(0))
        state, metrics = step(state, rows)
    return jax.tree.map(np.asarray, (metrics["loss"], state.params))


def is_wrong(model, size, full):
    """Whether two towers of rows that are padded to a full batch differ from one.

    Or the step refuses it, since padding would count.
    """
    try:
        one = trained(model, 1, [size])
        two = trained(model, 2, [full, size])
    except TypeError:  # rows that make no groups
        return False
    except ValueError as error:
        return "padding would count" in str(error)
    pairs = zip(*map(jax.tree.leaves, (one, two)), strict=True)
    return not all(np.allclose(x, y, rtol=1e-3, atol=1e-5) for x, y in pairs)


NAMES = [(deck, name) for deck, names in UNMASKED.items() for name in sorted(names)]


@pytest.mark.parametrize(("deck", "name"), NAMES)
def test_what_is_left_out_is_wrong_where_padded(deck, name):
    model = RIGHT[deck][name]()
    draw = np.random.default_rng(3).normal

    def filled(x):
        return x if np.any(x) else draw(size=x.shape).astype(x.dtype)

    params, batch = jax.tree.map(filled, (model.params, model.batch))
    model = model._replace(params=params, batch=batch)
    full = len(batch["x"])
    assert any(is_wrong(model, size, full) for size in range(full - 1, 2, -1))


def test_what_is_left_out_always_is_wrong():
    """Of some rows, not all of which are finite; and a constant of each tower."""
    assert IN_TRUTH_WRONG == {"where_any", "a term a constant"}
    model = RIGHT["known_wrong"]["where_any"]()
    x = model.batch["x"].copy()
    x[0, 0] = np.inf
    broken = model._replace(batch=model.batch | {"x": jnp.asarray(x)})
    one = trained(broken, 1, [12])[0]
    two = trained(broken, 2, [12])[0]
    assert one == 0.0 and two != 0.0
