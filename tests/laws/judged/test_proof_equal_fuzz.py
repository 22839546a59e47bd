"""Random functions of a tower: what is proved of them holds when they are run."""

import equal_programs
import jax
import pytest
from equal_programs import function_of, judged

NAMES = sorted({x.__name__ for x in equal_programs.OPERATIONS})


@pytest.fixture(autouse=True)
def exact():
    """Numbers of 64 bits, and no check of ranks: programs are random."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


def refuse_false(seed, padded, operations=equal_programs.OPERATIONS):
    """How much was proved; each value and derivative of it must be the same."""
    try:
        found = judged(function_of(seed, operations), padded=padded)
    except ValueError as error:  # a loop of which JAX takes no gradient
        if "Reverse-mode differentiation does not work" not in str(error):
            raise
        return 0
    for equality, is_value, is_derivative in found:
        assert is_value is not False, (seed, equality)
        assert is_derivative is not False, (seed, equality)
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("first", range(4, 300, 60))
def test_what_is_proved_of_a_random_function_holds(first, padded):
    seeds = [first + i + j for i in (0, 20, 40) for j in range(3)]
    numbers = [refuse_false(seed, padded) for seed in seeds]
    assert sum(numbers) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_proved_of_each_operation_holds(name):
    operation = [getattr(equal_programs, name)]
    for seed in range(4):
        refuse_false(seed, seed % 2 == 1, operation)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [8])
def test_what_is_proved_of_a_few_random_functions_holds(seed):
    refuse_false(seed, padded=True)
