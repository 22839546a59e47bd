"""Run a program as its author wrote it, in this process, on all devices of its JAX."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from towerjax.mesh.devices import Device, wake_cpu_devices
from towerjax.prover.programs.compare import runs_nearby
from towerjax.prover.programs.devices import refuse_others
from towerjax.prover.programs.processes import (
    NamedFunction,
    ToldError,
    find_function,
    forgets_modules,
)
from towerjax.prover.programs.programs import ProgramReport, proved_on
from towerjax.prover.programs.read import Reading, digest_of, read_program
from towerjax.prover.programs.runs import Seen, UserProgram
from towerjax.prover.programs.traced import NUMBER_TYPES, flatten
from towerjax.types.refusals import types_of

FORM = "make()"
_ANOTHER = (
    "where {form} is called for each number of devices in one process, its program on"
    " {number} is another than in a process of its own, since its function or a module"
    " holds what an earlier call has changed"
)


class Ran(NamedTuple):
    """The results of a program that ran in a process of its own.

    Attributes:
      seen: The results of its calls.
      reading: The findings in its trace.
      is_program: Whether ``make`` returned a program. If not, it returned results.
      digest: A text that identifies its trace; "" if it has none.
    """

    seen: Seen
    reading: Reading
    is_program: bool
    digest: str


def run_program(named: NamedFunction, devices: int) -> Ran:
    """Make, run and trace a program in this process, and return its results."""
    program, is_program = _made(find_function(named, devices), devices)
    seen = program.run()
    read = read_program(program)
    used = seen.devices | read.devices | _devices_in_use()
    with _told():
        refuse_others(jax.devices(), used, FORM, "Use all of jax.devices()")
    # The results are sent to another process. Devices cannot be sent, so they are left
    # out.
    return Ran(
        seen._replace(devices=frozenset()),
        read._replace(devices=frozenset()),
        is_program,
        digest_of(program),
    )


def run_nearby(named: NamedFunction, devices: int, rounding: float) -> list[Seen]:
    """Run a program with its arguments, and with arguments whose rounding is changed.

    ``rounding`` is the relative amount by which they are changed.
    """
    make = find_function(named, devices)
    program, _ = _made(make, devices)
    first = program.run()
    runs = [first]
    if first.has_arguments:
        with _told():
            runs += runs_nearby(
                program, first, lambda: _made(make, devices)[0], rounding
            )
    return [x._replace(devices=frozenset()) for x in runs]


def prove_program(
    named: NamedFunction, digests: Mapping[int, str]
) -> tuple[ProgramReport | None, str]:
    """Make and trace a program in this process, and return the result of `proved_on`.

    The program is made for each number of devices in turn, each time with a JAX that
    has this number of devices, and with modules that are imported anew. ``digests`` has
    the digest of each number's trace in its own process. Nothing is proved if a trace
    here has another digest.
    """
    programs = dict[int, UserProgram]()
    for number, digest in digests.items():
        wake_cpu_devices(number)
        with forgets_modules():
            program, _ = _made(find_function(named, number), number)
            if digest_of(program) != digest:
                return None, _ANOTHER.format(form=FORM, number=number)
        programs[number] = program
    with _told():
        return proved_on(programs)


def _made(make: Callable[[], Any], devices: int) -> tuple[UserProgram, bool]:
    """Take the program that ``make`` returns, with True.

    If ``make`` returns anything else, return a function that returns that as the
    program, and False.
    """
    gave = make()
    with _told():
        if jax.device_count() != devices:
            raise ValueError(
                f"{FORM} ran with {jax.device_count()} devices instead of {devices},"
                " because the program starts JAX's devices while it is imported. Leave"
                " jax_num_cpu_devices to the check."
            )
        match gave:
            case (fn, tuple() | list()) if callable(fn):
                return UserProgram(FORM, gave), True
        if not any(isinstance(x, NUMBER_TYPES) for x in flatten(gave)[0]):
            raise ValueError(
                f"{FORM} returned {types_of(gave)}, but must return (fn, args), a"
                " function and the tuple of its arguments, or the values to compare,"
                " such as the final state."
            )

    def finished() -> Any:
        return gave

    return UserProgram(FORM, (finished, ())), False


def _devices_in_use() -> frozenset[Device]:
    """Find the devices that hold arrays, or for which programs are compiled."""
    devices = {x for array in jax.live_arrays() for x in array.sharding.device_set}
    for program in jax.devices()[0].client.live_executables():
        devices.update(program.local_devices())
    return frozenset(devices)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn a ``ValueError`` in the `with` into one that the starting process raises."""
    try:
        yield
    except ValueError as error:
        raise ToldError(error) from error
