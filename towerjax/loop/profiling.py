"""Trace some steps of a run with JAX's profiler, and name every step in a trace."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from towerjax.loop.files import checked_path
from towerjax.types.options import check_whole, refuse_option
from towerjax.types.warning import warn


def check_profile(profile: Any) -> tuple[int, int, str] | None:
    """``(first, last, folder)``, or raise a ValueError."""
    if profile is None:
        return None
    is_pair = isinstance(profile, Sequence) and not isinstance(profile, str)
    if not (is_pair and len(profile) in (2, 3)):
        what = "None, (first, last) or (first, last, folder)"
        what += ": the numbers of the steps to trace, such as (10, 15)"
        refuse_option("profile", profile, what)
    first, last, folder = (*profile, "profile")[:3]
    check_whole("profile[0], the first step,", first)
    check_whole("profile[1], the last step,", last, int(first))
    checked_path("profile[2]", folder, "a folder", is_local_only=True)
    return int(first), int(last), os.fspath(folder)


class Profiler:
    """Traces the steps from ``first`` to ``last`` of a run, on process 0."""

    def __init__(
        self, profile: tuple[int, int, str] | None, note: Callable[[str], None]
    ) -> None:
        self._first, self._last, self._folder = profile or (math.inf, 0, "")
        self._is_tracing, self._note = False, note

    @contextlib.contextmanager
    def step(self, number: int, wait: Callable[[], None]) -> Iterator[None]:
        """The context of a step, which a trace shows by its number.

        Where the trace begins or ends with the step, all calls are waited for.
        """
        if not self._is_tracing and self._first <= number <= self._last:
            wait()
            self._is_tracing = True
            if jax.process_index() == 0:
                jax.profiler.start_trace(self._folder)
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if self._is_tracing and number >= self._last:
            wait()
            self.close()
            self._note(f"trace written to {self._folder!r}")

    def close(self) -> None:
        """Write the trace if it was begun, as where the run ends before it."""
        if self._is_tracing:
            self._first, self._is_tracing = math.inf, False
            if jax.process_index() == 0:
                jax.profiler.stop_trace()

    def warn_unused(self) -> None:
        """Warn if the run did none of the steps."""
        if self._first < math.inf:
            warn(
                f"profile=({self._first}, {self._last}): the run did none of these"
                " steps, and wrote no trace. Steps are numbered as in the state, from"
                " 1."
            )
