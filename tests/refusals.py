"""The law of a refusal: before anything is compiled, in few words, and nothing lost."""

import re

import jax
import pytest


def refused(names, call, text, error=ValueError):
    """What a call says that is refused, of which `text` is a pattern.

    `names` are those of what was compiled, of the fixture ``compiled``.
    """
    alive = jax.live_arrays()
    names.clear()
    with pytest.raises(error, match=re.compile(text, re.DOTALL)) as caught:
        call()
    parts = ("step", "(run)", "on_device")
    assert not any(part in name for name in names for part in parts), names
    assert not any(x.is_deleted() for x in alive)
    assert len(str(caught.value)) < 2000
    return str(caught.value)
