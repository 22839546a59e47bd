"""What the tests lean on: programs in processes of their own."""

import forked
import jax
import pytest


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
