"""What the tests lean on: cases that cover pairs, programs in processes of theirs."""

import forked
import jax
import pytest
from conftest import covering, pairs_of


@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b, c", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("d", "xy")
@pytest.mark.parametrize("e", [None, ...])
def test_few_cases_have_every_pair(request, a, b, c, d, e):
    """At least 12 of 48; fewer where they are chosen on the command line."""
    name = request.node.originalname
    cases = [x for x in request.session.items if x.originalname == name]
    kept = covering(cases)
    pairs = set().union(*map(pairs_of, cases))
    assert set().union(*map(pairs_of, kept)) == pairs
    assert len(kept) <= 14


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
