"""The diffs of public programs: what they apply to, and what docs count of them."""

import importlib
import re

import pytest
from checkout import ROOT

conversions = importlib.import_module("benchmarks.conversions.__main__")
PAGE = ROOT / "docs" / "public_code.md"


def test_a_diff_removes_and_adds_lines_of_the_pinned_file_alone():
    text = b"one\ntwo\nthree\nfour\n"
    diff = conversions.Diff(
        "a.py",
        conversions.blob_of(text),
        removed={2: 2},
        added={0: ["zero\n"], 3: ["2\n", "3\n"]},
    )
    assert diff.applied(text) == b"zero\none\n2\n3\nfour\n"
    assert diff.blob == "f384549cbeb481e437091320de6d1f2e15e11b4a"  # git hash-object
    with pytest.raises(ValueError, match=r"a\.py is not that of the pinned commit"):
        diff.applied(text + b"\n")


@pytest.mark.parametrize("program", conversions.PROGRAMS, ids=lambda x: x.name)
def test_a_page_counts_the_lines_of_each_diff(program):
    removed, added = conversions.counts(program.name)
    row = re.search(rf"^\| {program.folder} \| .*$", PAGE.read_text(), re.M)
    cells = [cell.strip() for cell in row[0].split("|")[2:-1]]
    assert cells == [program.commit[:8], str(program.towers), str(removed), str(added)]
    assert removed and all(
        "towerjax" not in diff.path for diff in conversions.diffs_of(program.name)
    )
