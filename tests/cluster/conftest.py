import re

import forked
import pytest
from programs import STEPS, TRAIN


@pytest.fixture(scope="session")
def bits(tmp_path_factory):
    """Those of a run by one process that nothing disturbs."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return re.findall(r" bits (\w+)$", forked.printed(TRAIN, folder, f"{STEPS}"), re.M)[
        0
    ]
