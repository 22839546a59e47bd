"""Show the progress of a run: a bar on a terminal or in a notebook, or lines."""

import dataclasses
import datetime
import functools
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from towerjax.mesh.interrupt import uninterrupted
from towerjax.types.options import check_choice, refuse_option
from towerjax.types.tables import drawn


def _ignore(*_: Any) -> None:
    """Show nothing."""


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Display:
    """A display of a run's progress, made of functions; by default it shows nothing."""

    seconds_between: float = float("inf")  # the least time between two shown texts
    # Replaces the shown text and bar. Its arguments are ``(done, total, text)``.
    show: Callable[[int, int | None, str], None] = _ignore
    note: Callable[[str], None] = _ignore  # adds a line that stays
    close: Callable[[], None] = _ignore  # ends the display's line


def _terminal_bar() -> Display:
    """Show a rich bar on stderr; other output to the terminal appears above it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    class VisibleCursor(Console):
        """A console that never hides the cursor.

        A process that is killed could not show it again.
        """

        def show_cursor(self, *_: Any) -> bool:
            return False

    console = VisibleCursor(file=sys.stderr, force_terminal=True)
    # rich's own thread does not redraw, because it would compete with the run; `show`
    # does. Standard output is redirected only if it is a terminal. Otherwise rich would
    # send to stderr what belongs into a file or a pipe.
    takes = _is_terminal(sys.stdout)
    bar = Progress(
        BarColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        auto_refresh=False,
        redirect_stdout=takes,
    )
    task = bar.add_task("starting", total=None)
    bar.start()
    bar.refresh()

    def show(done: int, total: int | None, text: str) -> None:
        shown = {"completed": done, "total": total, "description": text}
        bar.update(task, **shown, refresh=True)

    note = functools.partial(console.print, markup=False, highlight=False)
    return Display(0.1, show, note, functools.partial(uninterrupted, bar.stop))


def _notebook_bar() -> Display:
    """Show a rich bar that is redrawn in its place, without widgets."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def bundle(done: int, total: int | None, text: str) -> Any:
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total, done, width=30, pulse=False)
        row.add_row(*([] if total is None else [bar]), Text(text))
        return drawn(row)

    display = sys.modules["IPython"].display.display
    handle = display(bundle(0, None, "starting"), raw=True, display_id=True)

    def show(*shown: Any) -> None:
        handle.update(bundle(*shown), raw=True)

    return Display(0.25, show, functools.partial(print, flush=True))


def _is_terminal(stream: Any) -> bool:
    return getattr(stream, "isatty", lambda: False)()


def in_notebook() -> bool:
    """Return whether this process serves a notebook; does not import IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def check_progress(progress: Any) -> None:
    """Raise unless the value is valid for ``progress`` of `run`."""
    if not isinstance(progress, Sequence) or isinstance(progress, str):
        check_choice("progress", progress, (None, True, False))
    elif not progress or not all(isinstance(name, str) for name in progress):
        form = "None, True, False, or the names of metrics to show beside the loss"
        refuse_option("progress", progress, form + ", such as ['accuracy']")


def choose_display(progress: bool | None) -> Display:
    """Choose the display for ``progress``; in a job only process 0 shows."""
    # Outside of a job the process index is not asked for. Asking starts JAX's devices,
    # which a benchmark must not do.
    is_other = jax.distributed.is_initialized() and jax.process_index() > 0
    if progress is False or (progress is None and is_other):
        return Display()
    if in_notebook():
        return _notebook_bar()
    is_plain = os.environ.get("TERM") == "dumb" or not _is_terminal(sys.stderr)
    if progress or not is_plain:
        return _terminal_bar()
    return Display(5.0, lambda done, total, text: _print(text), _print)


class Progress:
    """The steps and evaluations of a run, shown at the pace of its display."""

    def __init__(
        self,
        progress: bool | Sequence[str] | None,
        start: int,
        end: int | None,
        batches: Iterable[Any] | None = None,
    ) -> None:
        """Prepare to show the steps after ``start`` up to ``end``.

        If ``end`` is None, the run ends with the data.
        """
        if end is None and (left := operator.length_hint(batches, -1)) >= 0:
            end = start + left
        is_named = not isinstance(progress, bool | None)
        self._names = tuple(dict.fromkeys(("loss", *(progress if is_named else ()))))
        self._display = choose_display(None if is_named else progress)
        self._start = start
        self._end = end
        self._total = None if end is None else max(end - start, 0)
        self.note = self._display.note  # adds a line that stays
        self._next_s = 0.0
        self._waiting: tuple[int, Mapping[str, Any], float] | None = None

    def phase(self, number: int, label: str) -> None:
        """Show what happens before a step, such as compiling."""
        text = f"step {number}: {label}"
        self._display.show(number - 1 - self._start, self._total, text)

    def step(self, number: int, metrics: Mapping[str, Any], rate: float) -> None:
        """Show that the steps up to this one are done, now or with a later text."""
        if unknown := [x for x in self._names[1:] if x not in metrics]:
            raise ValueError(
                f"progress names {unknown[0]!r}, but the metrics of step {number} are"
                f" {', '.join(map(repr, metrics))}. Name some of these."
            )
        self._waiting = (number, metrics, rate)
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._display.seconds_between
            self._show()

    def _show(self) -> None:
        if self._waiting is None:
            return
        (number, metrics, rate) = self._waiting
        self._waiting = None
        left = None if self._end is None else self._end - number
        text = f"step {number}" if left is None else f"step {number}/{self._end}"
        for name in self._names:
            if name in metrics:
                text += f"  {name} {format_value(metrics[name])}"
        text += f"  {rate:.1f} steps/s"
        if left and rate > 0:
            text += f"  {datetime.timedelta(seconds=int(left / rate))} left"
        self._display.show(number - self._start, self._total, text)

    def evaluation(
        self, number: int, values: Mapping[str, Any], stopped: str | None
    ) -> None:
        """Add a line for an evaluation, and one for the reason if the run stops."""
        if number == self._end or stopped or time.monotonic() >= self._next_s:
            self._show()  # otherwise a log would have two lines in a row
        names = sorted(values, key=lambda name: (name != "loss", name))
        shown = "  ".join(f"{name} {format_value(values[name])}" for name in names)
        self.note(f"evaluation after step {number}  {shown}")
        if stopped is not None:
            self.note(f"stopped after step {number}: {stopped}")

    def close(self) -> None:
        """Show the last step, and end the display."""
        try:
            self._show()
        finally:
            self._display.close()


def format_value(value: Any) -> str:
    """Write a metric as a short text."""
    value = np.asarray(value)
    if value.ndim == 0:
        return f"{value.item():#.4g}" if value.dtype.kind == "f" else str(value)
    return f"array{list(value.shape)}"
