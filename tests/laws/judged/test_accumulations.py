"""Accumulations by hand: the right one ran the same, each fault is as the page says."""

import re

import accumulations
import pytest
from checkout import ROOT

import towerjax as tj

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "how_to" / "gradient_accumulation.md").read_text()
TIMES = dict(re.findall(r"^\| `(\w+)`: .*? \| (\S+) \|", PAGE, re.M))


def test_the_right_one_ran_the_same():
    make = accumulations.made(accumulations.RIGHT)
    assert tj.testing.same_for(make, micro_batches=(1, 2, 4)).compared
    report = tj.testing.prove(make, micro_batches=(1, 2, 4))
    assert {x.says for x in report.equal} == {"ran the same"}


@pytest.mark.parametrize("step", accumulations.WRONG, ids=lambda step: step.__name__)
def test_a_wrong_one_is_refused_with_its_factor(step):
    name = "world_size" if "world_size" in step.__name__ else "micro_batches"
    with pytest.raises(tj.testing.SplitError) as caught:
        tj.testing.same_for(accumulations.made(step), **{name: (1, 2, 4)})
    found = caught.value.findings[0]
    assert f"{found.value / found.one_tower:.2f}" == TIMES[step.__name__]
    if step is accumulations.divided_twice:
        assert f"A factor or divisor depends on {name}" in str(caught.value)
    assert {x.__name__ for x in accumulations.WRONG} == {*TIMES}
