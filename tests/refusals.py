"""The law of a refusal: before anything is compiled, in few words, and nothing lost."""

import pathlib
import re
import traceback

import jax
import pytest

import towerjax as tj

OURS = pathlib.Path(tj.__file__).parent


def refused(names, call, text, error=ValueError, by_us=False):
    """What a call says that is refused, of which `text` is a pattern.

    `names` are those of what was compiled, of the fixture ``compiled``. An error may
    have to be one that a line of ours raises, and not what JAX or NumPy say.
    """
    alive = jax.live_arrays()
    names.clear()
    with pytest.raises(error, match=re.compile(text, re.DOTALL)) as caught:
        call()
    parts = ("step", "(run)", "on_device")
    assert not any(part in name for name in names for part in parts), names
    assert not any(x.is_deleted() for x in alive)
    assert len(str(caught.value)) < 2000
    if by_us:
        frame = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert OURS in pathlib.Path(frame.filename).parents, (frame, caught.value)
        assert "raise" in frame.line, (frame.line, caught.value)
    return str(caught.value)
