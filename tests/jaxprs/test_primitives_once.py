"""What is known of a primitive stands once, and the lists beside it agree with it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.jaxprs import flops
from towerjax.jaxprs.equation import ELEMENTWISE, IDENTITIES, PLAIN
from towerjax.proof.equal import one_tower  # noqa: F401 - it registers all rules
from towerjax.proof.equal.equation_pair import RULES

# The proof gives these more than their elements.
OWN_RULES = {"conj", "imag", "real", "complex", "reduce_precision", "neg"}
# Bits may be joined or split, so that a shape changes.
NOT_ALWAYS = {"bitcast_convert_type"}
# No public name of JAX has it, so that nothing is known of its arithmetic.
OF_NEWER = {"mulhi"}


def test_the_proof_has_the_same_elementwise_primitives():
    by_element = {name for name, x in RULES.items() if x.by_element}
    assert by_element - NOT_ALWAYS | OWN_RULES == ELEMENTWISE
    assert OWN_RULES <= RULES.keys()


def test_arithmetic_knows_each_of_them():
    plain = {x.name for x in PLAIN}
    assert ELEMENTWISE <= flops._FREE | plain | OF_NEWER


def test_none_is_an_identity():
    assert not ELEMENTWISE & {*IDENTITIES} - {
        "reduce_precision",
        "convert_element_type",
    }


@pytest.mark.parametrize("name", ["erfc", "lgamma", "sinh", "atan2", "tan"])
def test_an_update_of_shards_gathers_nothing_for_them(name):
    fn = getattr(jax.lax, name)
    number = len(inspect.signature(fn).parameters) - (
        "accuracy" in str(inspect.signature(fn))
    )

    def changed(updates, state, params=None):
        return jax.tree.map(lambda g: 1e-3 * fn(*[g] * number), updates), state

    optimizer = optax.chain(
        optax.sgd(0.1), optax.GradientTransformation(lambda p: (), changed)
    )

    def loss_fn(params, batch, tower):
        return tj.Weighted.mean(((batch @ params) ** 2), tower.weight)

    strategy = tj.Mirrored(["cpu:0", "cpu:1"], towers=2, state="sharded")
    step = tj.build_train_step(loss_fn, optimizer, strategy)
    batch = np.ones((4, 8), np.float32)
    state = step.init(jnp.ones(8))
    text = step.program(state, batch).call.as_text()
    alone = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    plain = alone.program(alone.init(jnp.ones(8)), batch).call.as_text()
    assert text.count("all-gather(") == plain.count("all-gather(")
