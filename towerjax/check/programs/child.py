"""Run a program as it is, in this process, on all devices of its JAX."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from towerjax.check.programs.compare import runs_nearby
from towerjax.check.programs.devices import refuse_others
from towerjax.check.programs.processes import (
    NamedFunction,
    ToldError,
    find_function,
    forgets_modules,
)
from towerjax.check.programs.programs import ProgramReport, proved_on
from towerjax.check.programs.read import Reading, digest_of, read_program
from towerjax.check.programs.runs import Seen, UserProgram
from towerjax.check.programs.traced import NUMBER_TYPES, flatten
from towerjax.mesh.devices import Device, wake_cpu_devices
from towerjax.types.refusals import types_of

FORM = "make()"
_ANOTHER = (
    "where {form} is called for each number of devices in one process, its program on"
    " {number} is another than in a process of its own, since its function or a module"
    " holds what an earlier call has changed"
)


class Ran(NamedTuple):
    """What a program gave in a process of its own.

    Attributes:
      seen: What its calls gave.
      reading: What its trace says.
      is_program: Whether ``make`` returned a program, and not results.
      digest: What tells its trace from another; "" if there is none.
    """

    seen: Seen
    reading: Reading
    is_program: bool
    digest: str


def run_program(named: NamedFunction, devices: int) -> Ran:
    """Make, run and trace a program; in a process of its own."""
    program, is_program = _made(find_function(named, devices), devices)
    seen = program.run()
    read = read_program(program)
    used = seen.devices | read.devices | _devices_in_use()
    with _told():
        refuse_others(jax.devices(), used, FORM, "Use all of jax.devices()")
    # Devices are of this process alone.
    return Ran(
        seen._replace(devices=frozenset()),
        read._replace(devices=frozenset()),
        is_program,
        digest_of(program),
    )


def run_nearby(named: NamedFunction, devices: int, rounding: float) -> list[Seen]:
    """Runs of its arguments, and of those rounded again; in a process of its own."""
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
    """What `proved_on` says of a program; in a process of its own.

    There it is made and traced for each number of devices in turn, each time by a JAX
    that has so many and by modules that are imported anew. Nothing is said of another
    program than that of each number's own process, by ``digests``.
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
    """The program, and whether ``make`` returned one, or else what it results in."""
    gave = make()
    with _told():
        if jax.device_count() != devices:
            raise ValueError(
                f"{FORM} ran with {jax.device_count()} devices in place of {devices}:"
                " the program asks JAX for them when it is imported, and uses them"
                " there. Leave jax_num_cpu_devices to the check."
            )
        match gave:
            case (fn, tuple() | list()) if callable(fn):
                return UserProgram(FORM, gave), True
        if not any(isinstance(x, NUMBER_TYPES) for x in flatten(gave)[0]):
            raise ValueError(
                f"{FORM} must return (fn, args), a function and the tuple of its"
                " arguments, or what is to be compared, such as the state at the end,"
                f" and returned {types_of(gave)}."
            )

    def finished() -> Any:
        return gave

    return UserProgram(FORM, (finished, ())), False


def _devices_in_use() -> frozenset[Device]:
    """Those that hold arrays, and those that compiled programs are for."""
    found = {x for array in jax.live_arrays() for x in array.sharding.device_set}
    for program in jax.devices()[0].client.live_executables():
        found.update(program.local_devices())
    return frozenset(found)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A ``ValueError`` of ours is raised where the process was started."""
    try:
        yield
    except ValueError as error:
        raise ToldError(error) from error
