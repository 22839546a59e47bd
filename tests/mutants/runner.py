"""Run mutants against their tests, one forked process for each."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from .mutant import Mutant, MutantError, apply

ROOT = pathlib.Path(__file__).parents[2]
# What tests import and what starts no JAX backend.
PRELOAD = "pytest hypothesis grain numpy jax optax flax.linen flax.nnx".split()
PRELOAD += ["orbax.checkpoint", "towerjax"]
TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Job:
    """Tests to run in a process of their own, over one mutant or over none.

    Attributes:
      name: What the table calls it.
      tests: Node ids.
      mutant: The mutant, or None: then all tests must pass.
    """

    name: str
    tests: tuple[str, ...]
    mutant: Mutant | None


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a job.

    Attributes:
      outcome: ``"killed"``, ``"survived"``, ``"not live"``, ``"broken"``; of tests
        without a mutant ``"passed"`` or ``"failed"``.
      detail: By which test and how, or why not.
      seconds: How long it took.
      cpu_seconds: How much of a core it took.
      output: What pytest wrote.
      failed: The test that failed first, if one did.
    """

    outcome: str
    detail: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    output: str = ""
    failed: str | None = None

    @property
    def is_good(self) -> bool:
        """Is it what should be?"""
        return self.outcome in ("killed", "passed")


class _Recorder:
    """A plugin of pytest: what passed, and how the first test failed."""

    def __init__(self, mutated_file: str, first: Callable[[], None]) -> None:
        self._first = first
        self.passed: list[str] = []
        self.failed: str | None = None
        self.detail = ""
        self.is_fair = True
        self._mutated_file = mutated_file

    def pytest_collection_finish(self) -> None:
        first_in_children(self._first)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        outcome = yield
        report = outcome.get_result()
        if report.failed and self.failed is None:
            error = call.excinfo
            text = (str(error.value).strip().splitlines() or [""])[0]
            self.failed = item.nodeid
            self.detail = f"{item.nodeid}: {error.typename}: {text}"
            self.is_fair = self._is_fair(error)
        if report.passed and report.when == "call":
            self.passed.append(item.nodeid)

    def _is_fair(self, error: Any) -> bool:
        """An assertion of the test, or an error that towerjax raises itself."""
        if isinstance(error.value, AssertionError | pytest.fail.Exception):
            return True
        file = str(error.traceback[-1].path)
        of_package = file.startswith(f"{ROOT / 'towerjax'}{os.sep}")
        raised = of_package and not file.endswith(self._mutated_file)
        own_type = type(error.value).__module__.startswith("towerjax")
        return own_type or (raised and isinstance(error.value, ValueError))


def first_in_children(call: Callable[[], None]) -> None:
    """Have each process of `tests/forked.py` that tests start call a function first."""
    if forked := sys.modules.get("forked"):  # tests were collected that import it
        forked.FIRST.append(call)


def run_here(job: Job) -> Result:
    """Run the job's tests in this process, which must not have run any before."""
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    options += [] if job.mutant is None else ["-x"]
    with tempfile.NamedTemporaryFile() as is_live:
        first = functools.partial(begin, job.mutant, is_live.name)
        recorder = _Recorder(f"<mutant {job.mutant.id}>" if job.mutant else "-", first)
        try:
            first()
        except MutantError as error:
            return Result("broken", str(error))
        code = int(pytest.main([*options, *job.tests], plugins=[recorder]))
        result = _result_of(job, recorder, code, bool(is_live.read()))
    return dataclasses.replace(result, failed=recorder.failed)


def begin(mutant: Mutant | None, is_live: str) -> None:
    """Put a mutant into this process for good."""
    if mutant is None:
        return
    file = os.open(is_live, os.O_WRONLY | os.O_APPEND)
    ran = list[int]()

    def live() -> None:
        with contextlib.suppress(OSError):  # a test may forbid to write
            if not ran:
                ran.append(os.write(file, b"ran"))

    apply(mutant, pytest.MonkeyPatch(), live)


def _result_of(job: Job, recorder: _Recorder, code: int, is_live: bool) -> Result:
    bad = "failed" if job.mutant is None else "broken"
    if code not in (0, 1):
        why = {4: "no such test, or it cannot be collected", 5: "no tests"}
        return Result(bad, why.get(code, f"pytest ended with {code}"))
    if job.mutant is None:
        if recorder.failed or not recorder.passed:
            return Result("failed", recorder.detail or "nothing was run")
        return Result("passed", f"{len(recorder.passed)} tests")
    if not is_live:
        return Result("not live", f"its statement never ran under {job.tests}")
    if recorder.failed is None:
        return Result("survived", f"{', '.join(job.tests)} passed")
    if not recorder.is_fair:
        return Result("broken", f"it only crashed: {recorder.detail}")
    return Result("killed", recorder.detail)


def _child(job: Job, output: str, answer: Any) -> None:
    file = os.open(output, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)
    gc.freeze()  # what the server imported stays; it is not looked through
    # Plugins take longer to start than most of these tests.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    result = run_here(job)
    answer.send(dataclasses.replace(result, cpu_seconds=time.process_time()))
    answer.close()
    sys.stdout.flush()
    # Nothing of the tests is waited for.
    os._exit(0)


def run_apart(job: Job, context: Any) -> Result:
    """Run the job's tests in a process of their own."""
    start = time.monotonic()
    mine, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        process = context.Process(target=_child, args=(job, output.name, theirs))
        process.start()
        theirs.close()
        bad = "failed" if job.mutant is None else "broken"
        try:
            result = Result(bad, f"no answer in {TIMEOUT_S:g} s")
            if mine.poll(TIMEOUT_S):
                result = mine.recv()
        except EOFError:
            result = Result(bad, "its process died")
        process.kill()
        process.join()
        seconds = time.monotonic() - start
        text = output.read()
        missing = [line for line in text.splitlines() if "not found:" in line]
        detail = "; ".join([result.detail, *missing])
        return dataclasses.replace(result, detail=detail, seconds=seconds, output=text)


def jobs_of(mutants: Sequence[Mutant]) -> list[Job]:
    """The named tests without a mutant, file by file, and then each mutant."""
    files: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        for test in mutant.killed_by:
            files.setdefault(test.partition("::")[0], {})[test] = None
    plain = [Job(f"{file}, as it is", tuple(x), None) for file, x in files.items()]
    return plain + [Job(x.id, x.killed_by, x) for x in mutants]


def run_all(
    jobs: Sequence[Job], workers: int, report: Callable[[Job, Result], None]
) -> list[Result]:
    """Run jobs, several at a time."""
    # A server that has imported everything and has no threads forks each process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, __name__])
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(run_apart, job, context): job for job in jobs}
        for future in concurrent.futures.as_completed(futures):
            report(futures[future], future.result())
    return [future.result() for future in futures]
