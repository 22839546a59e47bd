"""The law of a refusal: before anything is compiled, in few words, and nothing lost."""

import pathlib
import re
import traceback

import jax
import pytest

import towerjax as tj

OURS = pathlib.Path(tj.__file__).parent


def refused(names, call, text, error=ValueError, ours=ValueError):
    """What a call says that is refused, of which `text` is a pattern.

    `names` are those of what was compiled, of the fixture ``compiled``. Errors of the
    kind `ours` are raised by a line of ours: they are not what JAX or NumPy say.
    """
    alive = jax.live_arrays()
    names.clear()
    with pytest.raises(error, match=re.compile(text, re.DOTALL)) as caught:
        call()
    parts = ("step", "(run)", "on_device")
    assert not any(part in name for name in names for part in parts), names
    assert not any(x.is_deleted() for x in alive)
    assert len(str(caught.value)) < 2000
    if isinstance(caught.value, ours):
        frame = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert OURS in pathlib.Path(frame.filename).parents, (frame, caught.value)
        assert "raise" in frame.line, (frame.line, caught.value)
    return str(caught.value)
