"""What the tests lean on: cases that cover pairs, programs in processes of theirs."""

import itertools
import types

import forked
import jax
import pytest
from conftest import covering, pairs_of


def cases_of(**numbers):
    """A case for each combination of so many values of each argument."""
    for indices in itertools.product(*map(range, numbers.values())):
        named = dict(zip(numbers, indices, strict=True))
        yield types.SimpleNamespace(callspec=types.SimpleNamespace(indices=named))


@pytest.mark.parametrize(
    "numbers", [{"a": 4, "b": 3, "c": 3, "d": 2}, {"a": 2, "b": 5}]
)
def test_few_cases_have_every_pair(numbers):
    cases = list(cases_of(**numbers))
    kept = covering(cases)
    pairs = set().union(*map(pairs_of, cases))
    assert set().union(*map(pairs_of, kept)) == pairs
    products = [x * y for x, y in itertools.combinations(numbers.values(), 2)]
    assert len(pairs) == sum(products)
    assert max(products) <= len(kept) <= max(products) + 2


def number_of_devices(text):
    print(text)
    return len(jax.devices())


@pytest.mark.slow
def test_a_program_of_its_own(tmp_path):
    assert forked.called(number_of_devices, "not returned") == 8
    assert forked.told(number_of_devices, "told") == "told\n"
    file = tmp_path / "train.py"
    file.write_text(
        "import jax, sys\nprint(len(jax.devices()), sys.argv == [__file__])"
    )
    assert forked.printed(file) == "8 True\n"
    file.write_text("raise LookupError('not there')")
    with pytest.raises(AssertionError, match="LookupError: not there"):
        forked.printed(file)
    file.write_text("import warnings\nwarnings.warn('old')")
    with pytest.raises(AssertionError, match="UserWarning: old"):
        forked.printed(file)
