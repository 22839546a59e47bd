"""What does a function return on every tower, run one by one with real values?

For prints and the debugger. Each tower has a thread, of which one runs at a time: it
holds the baton until it finishes or waits for the others in a merge.
"""

import contextlib
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.mesh.placement import Placement, place
from towerjax.proof.found import ReplicationError
from towerjax.towers.cross_tower.regroup import is_same, regroup, select_tower
from towerjax.towers.merge import WithNames, are_apart, is_mergeable, stacked_rows
from towerjax.towers.tower import TowerInputs
from towerjax.towers.variables import TowerLocal, is_per_tower
from towerjax.types import Layout, PerTower, PyTree
from towerjax.types.leaves import has_tracers, is_traced, key_data, like_key

_PACKAGE = str(Path(__file__).parent.parent) + os.sep


def call_one_by_one(
    strategy: Any,
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    proof: Callable[[], list[bool] | None],
) -> PyTree:
    """What ``fn(tower, *args, **kwargs)`` returns on every tower, tower after tower."""
    if strategy.placement.num_processes > 1:
        raise ValueError(
            "call_for_each_tower: run_concurrently=False runs all towers in one"
            " process, but the devices are those of"
            f" {strategy.placement.num_processes}. Try the function on fewer towers, on"
            " this process's devices."
        )
    given = jax.tree.map(_own, (args, kwargs), is_leaf=is_per_tower)
    if is_traced(given):
        raise ValueError(
            "call_for_each_tower: run_concurrently=False shows real values, and inside"
            " jit, grad, vmap or scan there are none. Call it outside of them, or leave"
            " out run_concurrently."
        )
    rounds = _Rounds(strategy, fn, given)
    try:
        results = rounds.results()
    finally:
        rounds.stop()
    shared = {id(x) for x in jax.tree.leaves((given, rounds.merged))}

    def is_shared(leaves: Sequence[Any]) -> bool:
        if any(map(is_mergeable, leaves)):
            return id(leaves[0]) in shared and all(x is leaves[0] for x in leaves)
        return is_same(leaves)

    out = regroup(results, root="The towers' result", bare=is_shared)
    leaves, treedef = jax.tree.flatten(out, is_leaf=is_per_tower)
    if len(results) > 1 and (rounds.in_doubt or any(map(_rows_are_equal, leaves))):
        same = proof() or [False] * len(leaves)
        leaves = [
            x.values[0] if one and _rows_are_equal(x) else x
            for x, one in zip(leaves, same, strict=True)
        ]
        out = jax.tree.unflatten(treedef, leaves)
    return jax.tree.map(
        lambda x: _placed(x, strategy.placement), out, is_leaf=is_per_tower
    )


class _Arrival(NamedTuple):
    """Where a tower waits for the others, with what."""

    what: str
    merge_fn: Callable[..., PyTree]
    values: tuple[PyTree, ...]
    line: str


class _Stopped(BaseException):
    """Ends the thread of a tower that nobody waits for any more."""


class _TowerThread:
    """One tower's thread; runs only inside `resume`."""

    def __init__(self, run: Callable[["_TowerThread"], PyTree]) -> None:
        self._thread = threading.Thread(target=self._main, args=(run,), daemon=True)
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._stopped = False
        self.started = self.finished = False
        self.arrival: _Arrival | None = None
        self.result = self.error = self.answer = None

    def _main(self, run: Callable[["_TowerThread"], PyTree]) -> None:
        try:
            self._wait()
            self.result = run(self)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: B036, handed to who waits for it
            self.error = error
        self.finished = True
        self._paused.release()

    def _wait(self) -> None:
        self._go.acquire()
        if self._stopped:
            raise _Stopped

    def resume(self) -> None:
        """Until it finishes or waits."""
        if not self.started:
            self.started = True
            self._thread.start()
        self.arrival = None
        self._go.release()
        self._paused.acquire()

    def meet(self, what: str, merge_fn: Callable[..., PyTree], *values: Any) -> PyTree:
        """In the tower's own thread: the merge's result, once all towers are there."""
        if self._stopped:
            raise _Stopped
        if threading.current_thread() is not self._thread:
            raise ValueError(
                f"{what} at {_users_line()}, outside of its tower: all towers have"
                " met there already. In a merge function use strategy.reduce,"
                " strategy.unwrap and strategy.call_for_each_tower."
            )
        staged = isinstance(jnp.arange(1), Tracer)  # grad and vmap stage no constants
        if staged or has_tracers(values):
            where = "jit, cond or scan" if staged else "grad or vmap"
            other = "run under jax.disable_jit()" if staged else "meet outside of it"
            raise ValueError(
                f"{what} at {_users_line()} is inside {where}, where towers that run"
                " one by one cannot wait for each other. Leave out"
                " run_concurrently=False (jax.debug.print shows values there too), or"
                f" {other}."
            )
        self.arrival = _Arrival(what, merge_fn, values, _users_line())
        self._paused.release()
        self._wait()
        return self.answer

    def stop(self) -> None:
        """End the thread where it waits; one that still runs is left to end."""
        self._stopped = True
        if not self.started:
            return
        if not self.finished:
            if self.arrival is None:
                return  # it runs: the caller was interrupted
            self._go.release()
        self._thread.join()


class _Rounds:
    """All towers' threads, and the merges at which they meet."""

    def __init__(
        self, strategy: Any, fn: Callable[..., PyTree], given: tuple[Any, Any]
    ) -> None:
        self.strategy = strategy
        self.merged: list[Any] = []
        self.in_doubt = False
        per_device = strategy.num_towers // strategy.placement.num_devices
        axes = strategy.placement.axes
        inputs = TowerInputs(strategy, axes)
        settings = _settings()

        def run(thread: _TowerThread, t: int) -> PyTree:
            device = strategy.placement.jax_devices[t // per_device]
            with contextlib.ExitStack() as stack:
                for setting, value in [*settings, (jax.default_device, device)]:
                    stack.enter_context(setting(value))
                tower = inputs.tower(jnp.int32(t), None, None, 0, meet=thread.meet)
                args, kwargs = jax.tree.map(
                    lambda x: _row_of(x, t, strategy.num_towers),
                    given,
                    is_leaf=is_per_tower,
                )
                return fn(tower, *args, **kwargs)

        self.threads = [
            _TowerThread(lambda thread, t=t: run(thread, t))
            for t in range(strategy.num_towers)
        ]

    def results(self) -> list[PyTree]:
        """What each tower returned."""
        while True:
            for t, thread in enumerate(self.threads):
                thread.resume()
                if thread.error is not None:
                    thread.error.add_note(
                        f"In tower {t} of {len(self.threads)}, run one by one."
                    )
                    raise thread.error
            if all(thread.finished for thread in self.threads):
                return [thread.result for thread in self.threads]
            for thread, answer in zip(self.threads, self._merge(), strict=True):
                thread.answer = answer

    def stop(self) -> None:
        """End all threads that wait."""
        for thread in self.threads:
            thread.stop()

    def _merge(self) -> list[PyTree]:
        """Each tower's result of the merge at which all of them wait."""
        arrivals = [thread.arrival for thread in self.threads]
        there = [arrival for arrival in arrivals if arrival is not None]
        if len(there) < len(arrivals):
            raise _refusal("The towers made different numbers of merge calls", arrivals)
        first = there[0]
        for arrival in there:
            if arrival.what != first.what or (
                _code(arrival.merge_fn) is not _code(first.merge_fn)
            ):
                raise _refusal("The towers meet in different merges", arrivals)
        values = [arrival.values for arrival in there]
        merged = regroup(values, root=f"{first.what} at {first.line}: values", bare=_no)
        try:
            return self._merged(there, merged)
        except Exception as error:
            error.add_note(f"In the merge that the towers reached at {first.line}.")
            raise

    def _merged(self, arrivals: list[_Arrival], given: tuple[Any, ...]) -> list[Any]:
        first, T = arrivals[0], len(arrivals)
        ours = first.what != "tower.merge_call"
        rows = jax.tree.leaves(given, is_leaf=is_per_tower)
        if "Reduction.SUM" in first.what and any(map(_rows_are_equal, rows)):
            self.in_doubt = True
        if ours or all(_are_one(first.merge_fn, x.merge_fn) for x in arrivals):
            one = first.merge_fn(self.strategy, *given)
            self.merged.append(one)
            outs = [one] * T
        else:  # each tower's own function closes over values of its own
            outs = [arrival.merge_fn(self.strategy, *given) for arrival in arrivals]
        return [
            jax.tree.map(
                lambda x, t=t: _row_of(x, t, T, "A PerTower that merge_fn returned"),
                out,
                is_leaf=is_per_tower,
            )
            for t, out in enumerate(outs)
        ]


def _settings() -> list[tuple[Callable[[Any], Any], Any]]:
    """What the caller may have set for its thread alone, to be set in others."""
    names = "disable_jit debug_nans enable_x64 numpy_rank_promotion"
    names += " default_matmul_precision"
    config: Any = jax.config
    return [(getattr(jax, n), getattr(config, f"jax_{n}")) for n in names.split()]


def _no(leaves: Sequence[Any]) -> bool:
    """As compiled: arrays come apart, whether they are equal or not."""
    return not any(map(is_mergeable, leaves)) and is_same(leaves)


def _rows_are_equal(x: Any) -> bool:
    """Have all towers the same bits?"""
    if not isinstance(x, PerTower) or not is_mergeable(x.values):
        return False
    rows = np.asarray(key_data(x.values))
    return all(row.tobytes() == rows[0].tobytes() for row in rows)


def _own(x: Any) -> Any:
    """An argument as an array that any tower's device may use."""
    if is_per_tower(x):
        return jax.tree.map(_own, x)
    if not is_mergeable(x) or isinstance(x, Tracer):
        return x
    return like_key(jnp.asarray(np.asarray(key_data(x))), x)


def _row_of(x: Any, t: int, num_towers: int, name: str = "A PerTower argument") -> Any:
    if isinstance(x, TowerLocal):
        return jax.tree.map(lambda leaf: _row_of(PerTower(leaf), t, num_towers), x)
    if not isinstance(x, PerTower):
        return x
    if not are_apart(x.values) or len(x.values) != num_towers:
        return jax.tree.map(lambda row: row[t], stacked_rows(x, num_towers, name))
    numbers = bool | int | float | complex
    row = select_tower(x, t)
    return jax.tree.map(lambda v: jnp.asarray(v) if isinstance(v, numbers) else v, row)


def _placed(x: Any, placement: Placement) -> Any:
    if isinstance(x, PerTower) and are_apart(x.values):
        return x
    layout = Layout.PER_TOWER if is_per_tower(x) else Layout.MIRRORED
    return jax.tree.map(
        lambda v: place(v, placement, layout) if isinstance(v, jax.Array) else v, x
    )


def _users_line() -> str:
    """The innermost line that is not ours."""
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{path}:{frame.f_lineno}"


def _refusal(text: str, arrivals: Sequence[_Arrival | None]) -> ReplicationError:
    lines = [
        f"tower {t} finished"
        if x is None
        else f"tower {t} waits in {x.what} at {x.line}"
        for t, x in enumerate(arrivals)
    ]
    return ReplicationError(
        f"{text}: {', '.join(lines)}. Let every tower reach the same calls in the same"
        " order, whatever its id."
    )


def _code(fn: Any) -> Any:
    """What tells merge functions apart: their code, whatever they close over."""
    while hasattr(fn, "func") or hasattr(fn, "__wrapped__"):
        fn = fn.func if hasattr(fn, "func") else fn.__wrapped__
    return getattr(fn, "__code__", type(fn))  # a method passes on its function's


def _are_one(fn: Any, other: Any) -> bool:
    """Does it make no difference which of the two is called?"""
    if isinstance(fn, WithNames) and isinstance(other, WithNames):
        fn, other = fn.func, other.func
    if fn is other:
        return True
    if not isinstance(fn, types.FunctionType) or type(other) is not type(fn):
        return False
    cells = [[c.cell_contents for c in f.__closure__ or ()] for f in (fn, other)]
    defaults = [[*(f.__defaults__ or ()), f.__kwdefaults__] for f in (fn, other)]
    return all(
        len(one) == len(two) and all(map(operator.is_, one, two))
        for one, two in (cells, defaults)
    )
