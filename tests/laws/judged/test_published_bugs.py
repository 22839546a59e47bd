"""Published bugs: the proof and a run say of each what the page's tables say."""

import re

import bugs_of_2026
import published_bugs
import pytest
from checkout import ROOT

import towerjax as tj

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "evidence.md").read_text()
DEVICES = (1, 2, 4)


def rows(*head):
    """The cells of each row of the page's table with this head, by its first cell."""
    names = r" \| ".join(head)
    first = rf"^\| {names} \|\n\|[-|]+\|\n((?:\|.*\n)+)"
    [table] = re.findall(first, PAGE, re.M)
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {name.strip("`"): rest for name, *rest in cells}


def said(make, numbers=None):
    """What the proof says of a program, and the function that it names."""
    try:
        report = tj.testing.prove(make, **(numbers or {"devices": DEVICES}))
        [result] = report.equal
        how, text = result.says, result.why
    except tj.testing.SplitError as error:
        how, text = "differs in a run", str(error)
    except tj.ReplicationError as error:
        text = str(error)
        how = (re.findall(r"\S+ times", text) or ["copies differ"])[0]
    at = re.search(r"at \S+:\d+ \((\w+)", text)
    return how, at and at[1]


# Where the proof names another function than the bug's.
FUNCTIONS = {"clipped_before": "clip", "accuracy": None, "weighed_by_segment": None}
OLDER = rows("bug", "where", "what was wrong", "proof", "a run")


@pytest.mark.parametrize("name", published_bugs.BUGS)
def test_a_published_bug_is_found_as_the_page_says(name):
    wrong, right = published_bugs.BUGS[name]
    *_, proof, run = OLDER[name]
    how, line = said(wrong)
    assert proof == how
    assert line == FUNCTIONS.get(name, name)
    assert said(right)[0] == ("unknown" if name == "accuracy" else "proved")
    if run == "nothing":
        tj.testing.same_on_devices(wrong)
    else:
        with pytest.raises(tj.testing.SplitError) as caught:
            tj.testing.same_on_devices(wrong)
        assert str(caught.value.findings[0]).startswith(f"result is {run}")
    tj.testing.same_on_devices(right)


NEWER = rows("bug", "where", "what was wrong", "proof")
NAMES = [*bugs_of_2026.BUGS, *bugs_of_2026.OF_MICRO_BATCHES]


@pytest.mark.parametrize("name", NAMES)
def test_a_bug_of_2026_is_found_as_the_page_says(name):
    is_of_devices = name in bugs_of_2026.BUGS
    both = bugs_of_2026.BUGS if is_of_devices else bugs_of_2026.OF_MICRO_BATCHES
    numbers = {"devices" if is_of_devices else "micro_batches": DEVICES}
    wrong, right = [said(make, numbers)[0] for make in both[name]]
    assert NEWER[name][-1] == wrong != "proved"
    assert right == (
        "unknown" if name in ("lost_rows", "mean_of_padding") else "proved"
    )


def test_the_tables_have_each_bug():
    assert {*OLDER} == {*published_bugs.BUGS} and len(OLDER) == 17
    assert [*NEWER] == NAMES and len(NAMES) == 14
