"""Run a program as it is, in this process, on all devices of its JAX."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from towerjax.check.programs.compare import runs_nearby
from towerjax.check.programs.devices import refuse_others
from towerjax.check.programs.processes import NamedFunction, ToldError, find_function
from towerjax.check.programs.programs import ProgramReport, proved
from towerjax.check.programs.read import Reading, read_program
from towerjax.check.programs.runs import Seen, UserProgram
from towerjax.check.programs.traced import NUMBER_TYPES, flatten
from towerjax.mesh.devices import Device
from towerjax.proof.findings import ReplicationError
from towerjax.types.leaves import types_of

FORM = "make()"


class Ran(NamedTuple):
    """What a program gave in a process of its own.

    Attributes:
      seen: What its calls gave.
      reading: What its trace says.
      report: What `prove` says of its maps; None: it was not asked, or not traced.
      fault: What `prove` found wrong; "" if nothing.
    """

    seen: Seen
    reading: Reading
    report: ProgramReport | None
    fault: str


def run_program(named: NamedFunction, devices: int, is_proved: bool) -> Ran:
    """Make, run and trace a program; in a process of its own."""
    program = _made(find_function(named, devices), devices)
    seen = program.run()
    read = read_program(program)
    used = seen.devices | read.devices | _devices_in_use()
    with _told():
        refuse_others(jax.devices(), used, FORM, "Use all of jax.devices()")
    report, fault = _proved(program) if is_proved else (None, "")
    # Devices are of this process alone.
    return Ran(
        seen._replace(devices=frozenset()),
        read._replace(devices=frozenset()),
        report,
        fault,
    )


def run_nearby(named: NamedFunction, devices: int, rounding: float) -> list[Seen]:
    """Runs of its arguments, and of those rounded again; in a process of its own."""
    make = find_function(named, devices)
    program = _made(make, devices)
    first = program.run()
    runs = [first]
    if first.has_arguments:
        with _told():
            runs += runs_nearby(program, first, lambda: _made(make, devices), rounding)
    return [x._replace(devices=frozenset()) for x in runs]


def _made(make: Callable[[], Any], devices: int) -> UserProgram:
    """The program; what ``make`` returns that is no program is the result of one."""
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
                return UserProgram(FORM, gave)
        if not any(isinstance(x, NUMBER_TYPES) for x in flatten(gave)[0]):
            raise ValueError(
                f"{FORM} must return (fn, args), a function and the tuple of its"
                " arguments, or what is to be compared, such as the state at the end,"
                f" and returned {types_of(gave)}."
            )

    def finished() -> Any:
        return gave

    return UserProgram(FORM, (finished, ()))


def _devices_in_use() -> frozenset[Device]:
    """Those that hold arrays, and those that compiled programs are for."""
    found = {x for array in jax.live_arrays() for x in array.sharding.device_set}
    for program in jax.devices()[0].client.live_executables():
        found.update(program.local_devices())
    return frozenset(found)


def _proved(program: UserProgram) -> tuple[ProgramReport | None, str]:
    traced, _ = program.trace()
    if traced is None:
        return None, ""
    try:
        return proved(traced, program.traced_args), ""
    except ReplicationError as error:
        return None, str(error)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A ``ValueError`` of ours is raised where the process was started."""
    try:
        yield
    except ValueError as error:
        raise ToldError(error) from error
