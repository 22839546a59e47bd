"""Run a program for several numbers of micro-batches, on drawn rows and in float64.

Some accumulations are not proved, such as a Python loop over micro-batches, or several
calls of a step with `optax.MultiSteps`. These are run for each number and compared: on
the arguments as they are given, and on arguments that are drawn. A fault that the given
rows hide, such as that of a mean of means if all weights are 1, shows on drawn ones.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.jaxprs.sites import all_eqns
from towerjax.prover.comparison import RAISED_ON_OTHER_ROWS, AuditReport, NotAudited
from towerjax.prover.programs.compare import compare_runs, runs_nearby
from towerjax.prover.programs.read import Reading, read_program
from towerjax.prover.programs.runs import Seen, UserProgram
from towerjax.prover.programs.words import OF_MICRO_BATCHES
from towerjax.types.trees import is_key

_DRAWS = 2
_FLOATS_OF_64_BITS = "float64", "complex128"
_RTOL_OF_FLOAT64 = 1e-9
_ROUNDING_OF_FLOAT64 = 2.0**-50
_NOT_IN_FLOAT64 = "it was run in the dtypes of its arguments; in float64 it raises"
_NOT_ON_DRAWN = "it was run on the given rows alone; on drawn ones it raises"
_NOT_FINITE = "on drawn rows it has no finite value"


class RanTheSame(NamedTuple):
    """Which results agreed for all numbers of micro-batches, and what was not seen.

    Attributes:
      leaves: The names of results that agree on the given and on drawn arguments.
      notes: Notes on what could not be compared.
      why_not: The reason why other results were not compared on drawn arguments.
    """

    leaves: frozenset[str]
    notes: tuple[str, ...]
    why_not: str


@dataclasses.dataclass(frozen=True)
class _Draw:
    """How a program's arguments are changed before it runs.

    Attributes:
      number: 0 leaves the values as they are; any other number draws new ones.
      is_wide: Whether floats are made float64.
    """

    number: int
    is_wide: bool

    def dtypes(self) -> AbstractContextManager[Any]:
        """Allow float64 inside the block, if the arguments have it."""
        return jax.enable_x64(self.is_wide or jax.config.read("jax_enable_x64"))

    def changed(self, place: int, x: Any) -> Any:
        """Change the array with this place among all arguments, as the draw has it."""
        if is_key(x):
            return x
        new = np.asarray(x)
        if self.is_wide and jnp.issubdtype(new.dtype, jnp.inexact):
            is_complex = jnp.issubdtype(new.dtype, jnp.complexfloating)
            new = new.astype(_FLOATS_OF_64_BITS[is_complex])
        if self.number and new.size:
            new = np.asarray(_drawn(new, np.random.default_rng([self.number, place])))
        return jax.device_put(new, x.sharding) if isinstance(x, jax.Array) else new


class _Ran(NamedTuple):
    """A run for all numbers, with the arguments of a draw."""

    draw: _Draw
    made: Mapping[int, UserProgram]  # the programs as they were made
    programs: Mapping[int, UserProgram]  # those with the arguments of the draw
    seen: Mapping[int, Seen]

    @property
    def holds_state(self) -> bool:
        """Whether a program may hold values that the run has changed."""
        return any(
            x.is_changed or not self.programs[n].is_plain for n, x in self.seen.items()
        )


def compare_on_drawn(
    make: Callable[[int], UserProgram],
    traced: Mapping[int, UserProgram],
    leaves: Collection[str],
    rtol: float | None = None,
) -> RanTheSame:
    """Run a program for each number of micro-batches; raise if results differ.

    Args:
      make: A function that makes the program for a number.
      traced: The programs that were traced, by their numbers. They are not run, because
        they may hold tracers.
      leaves: The names of the results to compare.
      rtol: The tolerance; None takes it from the dtypes that are computed.

    Raises:
      SplitError: A result depends on the number of micro-batches.
    """
    reads = {number: read_program(program) for number, program in traced.items()}
    ran, told = _run_as_given(make, [*traced])
    if rtol is None and _is_float64(ran):
        rtol = _RTOL_OF_FLOAT64
    why_not = _NOT_FINITE
    compared = set[str]()
    notes = dict.fromkeys(told)
    for draw in range(_DRAWS + 1):
        if draw:
            try:
                ran = _run_again(make, ran, draw)
            except RAISED_ON_OTHER_ROWS as error:
                why_not = f"{_NOT_ON_DRAWN} {_short(error)}"
                notes[why_not] = None
                break
        try:
            report = _compare(make, ran, leaves, reads, rtol)
        except NotAudited as error:
            notes[str(error)] = None
            continue
        notes |= dict.fromkeys(report.notes)
        compared |= {*report.compared} if draw else set()
    return RanTheSame(frozenset(compared), tuple(notes), why_not)


def _run_as_given(
    make: Callable[[int], UserProgram], numbers: Sequence[int]
) -> tuple[_Ran, list[str]]:
    """Run the programs on the given arguments, in float64 if they allow it.

    Return also a note if they do not.
    """
    made = {number: make(number) for number in numbers}
    try:
        return _run(_Draw(0, is_wide=True), made), []
    except RAISED_ON_OTHER_ROWS as error:
        note = f"{_NOT_IN_FLOAT64} {_short(error)}"
    made = {number: make(number) for number in numbers}
    return _run(_Draw(0, is_wide=False), made), [note]


def _run_again(make: Callable[[int], UserProgram], ran: _Ran, draw: int) -> _Ran:
    """Run the programs on another draw; make them anew if they may hold a state."""
    made = {n: make(n) for n in ran.made} if ran.holds_state else ran.made
    return _run(dataclasses.replace(ran.draw, number=draw), made)


def _run(draw: _Draw, made: Mapping[int, UserProgram]) -> _Ran:
    with draw.dtypes():
        drawn = {n: x.with_arrays(draw.changed) for n, x in made.items()}
        return _Ran(draw, made, drawn, {n: x.run() for n, x in drawn.items()})


def _is_float64(ran: _Ran) -> bool:
    """Return whether programs compute in no float of fewer than 64 bits."""
    if not ran.draw.is_wide:
        return False
    with ran.draw.dtypes():
        traces = [x.trace()[0] for x in ran.programs.values()]
    dtypes = {
        getattr(var.aval, "dtype", np.dtype(bool))
        for trace in traces
        if trace is not None
        for eqn in all_eqns(trace.jaxpr)
        for var in eqn.outvars
    }
    floats = {x for x in dtypes if jnp.issubdtype(x, jnp.inexact)}
    return None not in traces and floats <= {np.dtype(x) for x in _FLOATS_OF_64_BITS}


def _compare(
    make: Callable[[int], UserProgram],
    ran: _Ran,
    leaves: Collection[str],
    reads: Mapping[int, Reading],
    rtol: float | None,
) -> AuditReport:
    """Compare the results for one draw of arguments; raise if some differ."""
    first = next(iter(ran.seen))

    def again(rounding: float) -> list[Seen]:
        with ran.draw.dtypes():
            nearby = runs_nearby(
                ran.programs[first],
                ran.seen[first],
                lambda: make(first).with_arrays(ran.draw.changed),
                _ROUNDING_OF_FLOAT64 if rtol == _RTOL_OF_FLOAT64 else rounding,
            )
        return [_with_leaves(x, leaves) for x in nearby]

    seen = {number: _with_leaves(x, leaves) for number, x in ran.seen.items()}
    return compare_runs(seen, reads, again, rtol, OF_MICRO_BATCHES.option)


def _with_leaves(seen: Seen, leaves: Collection[str]) -> Seen:
    """Drop the results of a run that have other names."""
    calls = [{n: x for n, x in call.items() if n in leaves} for call in seen.calls]
    return seen._replace(calls=tuple(calls))


def _drawn(x: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draw another array of a kind: its rows in another order, and other numbers.

    Floats are multiplied by 0.5 to 1.5, so that flags become unequal weights, and 0
    stays 0. If all elements are 0, such as those of a new bias, they become positive.
    Whole numbers, such as labels, stay what they are, except that flags which are all
    set become a mask.
    """
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)  # also of 16 bits
    if is_float and not x.any():
        return generator.uniform(0.1, 1, x.shape).astype(x.dtype)
    if is_float:
        factors = generator.uniform(0.5, 1.5, x.shape)
        return (_with_other_rows(x, generator) * factors).astype(x.dtype)
    if x.ndim and (x == 1).all():
        mask = generator.random(x.shape) < 0.7
        mask[..., 0] = True  # so that no row is all masked
        return mask.astype(x.dtype)
    return _with_other_rows(x, generator)


def _with_other_rows(x: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return generator.permutation(x) if x.ndim else x


def _short(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.150}"
