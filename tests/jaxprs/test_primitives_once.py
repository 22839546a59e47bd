"""What is known of a primitive stands once, and the lists beside it agree with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from towerjax.jaxprs import flops
from towerjax.jaxprs.equation import ELEMENTWISE, IDENTITIES, PLAIN
from towerjax.lowering.sharded_values import Shard, elementwise, is_elementwise
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
def test_values_that_are_shards_stay_so_through_them(name):
    fn = getattr(jax.lax, name)
    operands = [jnp.ones(4)] * (2 if name == "atan2" else 1)
    [eqn] = jax.make_jaxpr(fn)(*operands).eqns
    shards = [Shard(x[:2], 0) for x in operands]
    assert is_elementwise(eqn)
    [found] = elementwise(eqn, shards)
    assert isinstance(found, Shard) and found.dim == 0
    np.testing.assert_array_equal(found.data, fn(*[x[:2] for x in operands]))
