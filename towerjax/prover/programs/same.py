"""Compare a program's results for several values of a number that must not matter."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from towerjax.mesh.devices import Device
from towerjax.prover.comparison import AuditReport
from towerjax.prover.programs.child import (
    FORM,
    Ran,
    prove_program,
    run_nearby,
    run_program,
)
from towerjax.prover.programs.compare import (
    DEVICES,
    check_rtol,
    compare_runs,
    refuse_other_run,
    runs_nearby,
)
from towerjax.prover.programs.devices import (
    FORM_OF_MAKE,
    check_numbers,
    explained_list,
    lists_of_devices,
    refuse_others,
)
from towerjax.prover.programs.processes import (
    NamedFunction,
    ProgramDied,
    call_in_process,
    name_function,
)
from towerjax.prover.programs.programs import ProgramReport
from towerjax.prover.programs.read import read_program
from towerjax.prover.programs.runs import Seen, UserProgram
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_different, check_function
from towerjax.types.refusals import listed


@api_boundary
def same_on_devices(
    make: Callable[..., Any],
    devices: Sequence[int] = (1, 2, 4),
    *,
    rtol: float | None = None,
    timeout_s: float | None = None,
) -> AuditReport:
    """Raise if a program's results depend on the number of devices.

    The program is made and run once for each number. Its results are compared leaf by
    leaf with those on one device. Results that are split over devices are compared as
    whole arrays; if `jax.pmap` returns a copy per device, each copy is compared. Values
    that the program changes in place, in its arguments or in its function, are
    compared, too. If a result is an argument's new state, or something is changed in
    place, the program is called three times.

    A ``make`` without arguments is called in a new process for each number, whose JAX
    has that many CPU devices. So ``jax.devices()``, ``jax.set_mesh`` and a trainer's
    own ``main`` work unchanged. What it prints goes to stderr.

    Args:
      make: A function ``devices -> (fn, args)`` of a list of ``jax.Device``. The
        program must use exactly these devices, as in ``jax.sharding.Mesh(devices,
        "i")``. The global arguments are the same each time. ``fn`` may use ``jit``,
        ``shard_map``, ``pmap`` or plain Python, and may donate. Or a function
        ``make()`` at the top level of a file, which returns ``(fn, args)`` or the
        values to compare, such as the state after training.
      devices: The numbers of devices; the first must be 1.
      rtol: As for `assert_replicates`.
      timeout_s: The seconds after which a process of ``make()`` is killed; None waits
        for ever.

    Returns:
      An `AuditReport`. Its notes name what could not be compared, and results that
      differ from device to device but have the mean or the sum of one device.

    Raises:
      SplitError: A leaf depends on the number of devices. The error has both values,
        their factor if it is the number of devices or its inverse, and the lines that
        communicate.
      ValueError: There are too few devices; or the program uses other devices, gives
        nothing to compare, or is not deterministic.
      ProgramDied: A process of ``make()`` ended without a result, or did not end in
        time. The error has its last lines.

    Example:
      >>> import jax, numpy as np
      >>> def make(devices):
      ...     mesh = jax.sharding.Mesh(devices, "i")
      ...     mean = lambda x: jax.lax.pmean(x.mean(), "i")
      ...     specs = {"in_specs": jax.P("i"), "out_specs": jax.P()}
      ...     return jax.shard_map(mean, mesh=mesh, **specs), [np.arange(8.0)]
      >>> same_on_devices(make, devices=(1, 2)).compared
      ('result',)
    """
    if takes_nothing(make):
        named = name_function(FORM, make)
        numbers = check_numbers(devices)
        check_rtol(rtol)
        ran = run_in_processes(named, numbers, timeout_s)
        return compare_ran(named, ran, rtol, timeout_s)
    check_function("make", make, FORM_OF_MAKE)
    lists = lists_of_devices(devices)
    with explained_list():
        return _compare_made(
            DEVICES,
            lists,
            lambda number: UserProgram(FORM_OF_MAKE, make(lists[number])),
            rtol,
            lambda number, used: refuse_others(lists[number], used),
        )


@api_boundary
def same_for(
    make: Callable[[Any], tuple[Callable[..., Any], Sequence[Any]]],
    *,
    rtol: float | None = None,
    **numbers: Sequence[int],
) -> AuditReport:
    """Raise if a program's results depend on a number that must not matter.

    Examples are the number of micro-batches, of workers, or of steps in one call. The
    program is made and run once for each value and compared with the first, as
    `same_on_devices` does for devices.

    Args:
      make: A function ``number -> (fn, args)``, with the same arguments each time.
      rtol: As for `assert_replicates`.
      **numbers: The name of the number with two or more values, whole and >= 1, such as
        ``micro_batches=(1, 2, 4)``. With ``devices=`` it is `same_on_devices`.

    Returns:
      An `AuditReport`.

    Raises:
      SplitError: A leaf depends on the number. The error has both values, their factor
        if it is the number or its inverse, and the lines that use the number.
      ValueError: There is not exactly one number with two values; or the program gives
        nothing to compare, or is not deterministic.

    Example:
      >>> import numpy as np
      >>> def make(micro_batches):
      ...     def mean(rows):
      ...         parts = np.split(rows, micro_batches)
      ...         return sum(part.mean() for part in parts) / micro_batches
      ...     return mean, [np.arange(8.0)]
      >>> same_for(make, micro_batches=(1, 2, 4)).compared
      ('result',)
    """
    if len(numbers) != 1:
        raise ValueError(
            "same_for needs one number by its name, but got"
            f" {listed([*numbers]) or 'none'}. Write same_for(make, micro_batches=(1,"
            " 2, 4))."
        )
    [(of, values)] = numbers.items()
    if of == DEVICES:
        return same_on_devices(make, values, rtol=rtol)
    form = f"make({of})"
    check_function("make", make, form)
    different = check_different(of, values)
    return _compare_made(
        of, different, lambda number: UserProgram(form, make(number)), rtol
    )


def _compare_made(
    of: str,
    numbers: Iterable[int],
    make_program: Callable[[int], UserProgram],
    rtol: float | None,
    refuse: Callable[[int, frozenset[Device]], None] | None = None,
) -> AuditReport:
    """Make, run and trace a program for each number, and compare the results.

    ``of`` is the name of the number. ``refuse(number, devices)`` raises if a program
    used devices that it may not use.
    """
    check_rtol(rtol)
    first, *others = numbers
    programs = dict[int, UserProgram]()
    runs = dict[int, Seen]()
    for number in (first, *others):
        program = programs[number] = make_program(number)
        runs[number] = program.run()
        if number != first and of == DEVICES:
            program.release()
    # The programs are traced after all runs, because a trace could disturb a run.
    traced = others if of == DEVICES else (first, *others)
    reads = {number: read_program(programs[number]) for number in traced}
    if refuse is not None:
        for number, run in runs.items():
            of_meshes = reads[number].devices if number in reads else frozenset()
            refuse(number, run.devices | of_meshes)
    again = functools.partial(
        runs_nearby, programs[first], runs[first], lambda: make_program(first)
    )
    return compare_runs(runs, reads, again, rtol, of)


def takes_nothing(make: Any) -> bool:
    """Return whether a function must be called without an argument."""
    if not callable(make) or isinstance(make, type):
        return False
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # a compiled function may have no signature
        return False
    return not any(x.kind is not x.KEYWORD_ONLY for x in parameters)


def run_in_processes(
    named: NamedFunction, numbers: Sequence[int], timeout_s: float | None = None
) -> dict[int, Ran]:
    """Run a program in a new process for each number of devices.

    Return the results by these numbers.
    """
    ran = {}
    for number in numbers:
        ran[number] = call_in_process(
            _label(number), number, run_program, named, number, timeout_s=timeout_s
        )
    return ran


def prove_in_process(
    named: NamedFunction, ran: Mapping[int, Ran], timeout_s: float | None = None
) -> tuple[ProgramReport | None, str]:
    """Prove a program that ran; or give None, and why not.

    The proof is made in a new process, as the program ran in one for each number.

    Raises:
      ReplicationError: As `prove`.
    """
    digests = {number: x.digest for number, x in ran.items()}
    try:
        return call_in_process(
            "the proof",
            1,
            prove_program,
            named,
            digests,
            is_shown=False,
            timeout_s=timeout_s,
        )
    except ProgramDied as error:
        return None, str(error)


def compare_ran(
    named: NamedFunction,
    ran: Mapping[int, Ran],
    rtol: float | None,
    timeout_s: float | None = None,
) -> AuditReport:
    """Compare the results of a program that ran in a process per number of devices."""
    first, *others = ran

    def again(rounding: float) -> list[Seen]:
        label = f"{_label(first)}, rounded"
        nearby = call_in_process(
            label, first, run_nearby, named, first, rounding, timeout_s=timeout_s
        )
        refuse_other_run(nearby[0], ran[first].seen)
        return nearby

    runs = {number: x.seen for number, x in ran.items()}
    reads = {number: ran[number].reading for number in others}
    return compare_runs(runs, reads, again, rtol)


def _label(number: int) -> str:
    return f"{number} device{'s' * (number > 1)}"
