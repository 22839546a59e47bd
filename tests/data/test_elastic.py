"""Grain's elastic data in jobs of 4, 2 and 8 processes: each row is read once."""

import json
import os
import sys

import numpy as np
import pytest
from checkout import TESTS

import towerjax as tj

pytest.importorskip("grain.experimental", exc_type=ImportError)

sys.path.insert(0, str(TESTS / "workers"))
import elastic  # noqa: E402

sys.path.remove(str(TESTS / "workers"))
ALONE = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}


def job(folder, processes):
    """What each process of a job tells, after two batches."""
    command = [sys.executable, str(TESTS / "workers/elastic.py"), str(folder)]
    each = elastic.TOWERS // processes
    how = {"processes": processes, "devices_per_process": each, "env": ALONE}
    assert tj.cluster.launch(command, **how) == 0
    files = sorted(folder.glob(f"told.{processes}.*"))
    assert len(files) == processes
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
def test_jobs_of_other_numbers_of_processes_go_on_with_each_row_once(tmp_path):
    wanted = elastic.ElasticIterator(
        elastic.numbers(), elastic.BATCH, elastic.grain.ShardOptions(0, 1)
    )
    seen = []
    for processes in (4, 2, 8):
        told = job(tmp_path, processes)
        [place] = {json.dumps(x["place"], sort_keys=True) for x in told}
        (tmp_path / "place").write_text(place)
        for number in (0, 1):
            rows = [row for x in told for row in x["rows"][number]]
            alone = [int(row) for row in np.ravel(next(wanted))]
            assert sorted(rows) == sorted(alone)
            assert {x["sums"][number] for x in told} == {sum(alone)}
            seen += rows
    assert sorted(seen) == [*range(elastic.ROWS)]
