"""Fixtures of this room."""

import pytest
from first_calls import report

from towerjax.check import first_call


@pytest.fixture
def runs(monkeypatch):
    """The audits that were run, one entry each."""
    found = []
    run_audit = first_call.run_audit

    def counted(*args, **options):
        found.append(run_audit(*args, **options))
        return found[-1]

    monkeypatch.setattr(first_call, "run_audit", counted)
    yield found


@pytest.fixture
def counted(runs, monkeypatch):
    """As `runs`, of audits that find at once what that of `step_of` found."""
    found = report()
    runs.clear()
    give = lambda *_, **options: runs.append(found) or found  # noqa: E731
    monkeypatch.setattr(first_call, "run_audit", give)
    return runs
