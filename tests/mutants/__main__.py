"""Run mutants over their tests: ``python -m tests.mutants [--only B07] [--list]``."""

import argparse
import os
import sys
import time

from .catalogue import MUTANTS
from .covers import kept
from .generated import score
from .runner import Job, Result, jobs_of, run_all


def main() -> int:
    """Print each result and the score.

    Returns:
      0 if every mutant was killed and every named test passes without one, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", action="append", metavar="ID", default=[])
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
    killed = sum(v.outcome == "killed" for v in results.values())
    seconds = time.monotonic() - start
    cpu_seconds = sum(result.cpu_seconds for result in results.values())
    print(f"{seconds:.0f} s, of cores {cpu_seconds:.0f} s")
    print(f"killed {killed} of {len(mutants)}")
    return 0 if all(v.is_good for v in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
