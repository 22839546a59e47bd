"""Run mutants over their tests: ``python -m tests.mutants [--only B07] [--list]``."""

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence

from tests import green, reads

from .catalogue import MUTANTS
from .covers import kept
from .generated import score
from .mutant import Mutant
from .runner import Job, Result, jobs_of, run_all


def digests_of(mutants: Sequence[Mutant]) -> dict[str, str]:
    """Return what `tests.green` keeps of mutants: functions, changes and tests."""
    folder = pathlib.Path(__file__).parent
    machine = [(folder / f"{name}.py").read_text() for name in ("mutant", "runner")]
    return {
        f"mutant {x.id}": reads.digest(
            *machine, reads.function(x.where), x.old, x.new, *reads.tests(x.killed_by)
        )
        for x in mutants
    }


def main() -> int:
    """Print each result and the score.

    Returns:
      0 if every mutant was killed and every named test passes without one, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", action="append", metavar="ID", default=[])
    parser.add_argument(
        "--changed", action="store_true", help="which read something new"
    )
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--generated", type=int, metavar="N", help="draw N instead")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--under", default="towerjax", help="a folder or file")
    parser.add_argument("--covers", help="a file: which lines each test runs")
    options = parser.parse_args()
    if options.generated is not None:
        drawn = options.generated, options.seed, options.under
        covers = kept(options.covers, options.workers)
        return score(*drawn, covers, options.workers)
    unknown = set(options.only) - {mutant.id for mutant in MUTANTS}
    if unknown:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    mutants = [x for x in MUTANTS if not options.only or x.id in options.only]
    digests = digests_of(mutants)
    if options.changed:
        todo = {*green.changed(digests)}
        print(f"{len(todo)} of {len(mutants)} mutants read something new")
        mutants = [x for x in mutants if f"mutant {x.id}" in todo]
    if options.list:
        for x in mutants:
            print(f"{x.id}  {x.bug}\n     {x.where}\n     {' '.join(x.killed_by)}")
        return 0

    def report(job: Job, result: Result) -> None:
        about = "" if job.mutant is None else f"  {job.mutant.bug}"
        print(f"{result.cpu_seconds:5.1f} s  {result.outcome:8}  {job.name}{about}")
        if job.mutant is not None:
            print(f"{'':19} in {job.mutant.where}")
        print(f"{'':19} {result.detail[:200]}", flush=True)
        if not result.is_good:
            print(result.output)

    start = time.monotonic()
    jobs = jobs_of(mutants)
    results = dict(zip(jobs, run_all(jobs, options.workers, report), strict=True))
    for job, result in results.items():
        if not result.is_good:
            print(f"{result.outcome}: {job.name}: {result.detail}")
    killed = keep_green(results, digests)
    seconds = time.monotonic() - start
    cpu_seconds = sum(result.cpu_seconds for result in results.values())
    print(f"{seconds:.0f} s, of cores {cpu_seconds:.0f} s")
    print(f"killed {killed} of {len(mutants)}")
    return 0 if all(v.is_good for v in results.values()) else 1


def keep_green(results: Mapping[Job, Result], digests: Mapping[str, str]) -> int:
    """Keep the digests of mutants that are killed, if their tests pass without one.

    Returns:
      How many mutants are killed.
    """
    bad = {test for x, y in results.items() if not y.is_good for test in x.tests}
    fair = {}
    killed = 0
    gone = green.forgotten("mutant", [f"mutant {x.id}" for x in MUTANTS])
    for job, result in results.items():
        if job.mutant is None:
            continue
        name = f"mutant {job.mutant.id}"
        killed += result.outcome == "killed"
        if result.outcome == "killed" and not bad & {*job.tests}:
            fair[name] = digests[name]
        else:
            gone.append(name)
    green.keep(fair, gone)
    return killed


if __name__ == "__main__":
    sys.exit(main())
