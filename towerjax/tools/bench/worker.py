"""Who runs a trial? A process of its own.

It reads a job from its input, one JSON object, and writes what came of it into a file.
"""

import json
import pathlib
import sys
import time
from typing import Any

from towerjax.tools.bench.grid import Trial
from towerjax.tools.bench.machine import load
from towerjax.tools.bench.protocol import TimingProtocol
from towerjax.tools.named import named


def main() -> None:
    """Run the job of the standard input."""
    job = json.load(sys.stdin)
    record = run_and_note(Trial(**job["trial"]), TimingProtocol(**job["timing"]))
    pathlib.Path(sys.argv[1]).write_text(json.dumps(record))


def run_and_note(trial: Trial, timing: TimingProtocol) -> dict[str, Any]:
    """What came of a trial, whatever it was."""
    start, load_before = time.perf_counter(), load()
    try:
        if ":" in trial.by:
            found = named(trial.by)(trial, timing)
        else:
            from towerjax.tools.bench.trials import run_trial

            found = run_trial(trial, timing)
        found = {"status": "ok", **found}
    except Exception as error:  # of any kind: it is recorded, and the sweep goes on
        is_there = not isinstance(error, ModuleNotFoundError | NotImplementedError)
        status = "failed" if is_there else "not available"
        found = {"status": status, "error": f"{type(error).__name__}: {error}"}
    seconds = round(time.perf_counter() - start, 3)
    return {**found, "seconds": seconds, "load": load_before}


if __name__ == "__main__":
    main()
