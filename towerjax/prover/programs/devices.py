"""The devices that a program is given, and those that it uses."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence

import jax

from towerjax.mesh.devices import Device, canonical_device_name
from towerjax.prover.programs.runs import UserProgram
from towerjax.types.options import check_wholes

FORM_OF_MAKE = "make(devices)"


_OF_A_LIST = (
    "Make its mesh from the given devices in each call of make,"
    " jax.sharding.Mesh(devices, 'i')"
)
# The errors of Python, NumPy and JAX have these texts if a list, or a device in it, is
# used as a number.
_USED_AS_A_NUMBER = (
    r"slice indices must be integers|multiply sequence by non-int"
    r"|'(list|[\w.]*Device)' (object cannot be interpreted|and '\w+')"
    r"|'\w+' and '(list|[\w.]*Device)'"
)


def check_numbers(numbers: Sequence[int], at_most: int | None = None) -> list[int]:
    """Drop repeated numbers of devices; raise if the first is not 1.

    ``at_most`` is the largest number that is allowed.
    """
    different = list(dict.fromkeys(check_wholes("devices", numbers)))
    wrong = f"devices={numbers!r} must begin with 1 and have other numbers"
    is_plain = different[0] == 1 and len(different) > 1
    if not is_plain:
        others = [str(x) for x in different if x != 1] or ["2"]
        raise ValueError(
            f"{wrong}: devices=(1, {', '.join(others)}), or --devices 1"
            f" {' '.join(others)}."
        )
    if at_most is not None and max(different) > at_most:
        raise ValueError(
            f"devices={numbers!r}, but there are only {at_most} devices. On CPUs write"
            f' jax.config.update("jax_num_cpu_devices", {max(different)}) before JAX is'
            " used."
        )
    return different


def lists_of_devices(numbers: Sequence[int]) -> dict[int, list[Device]]:
    """List the devices to give to ``make``, for each number of devices."""
    counts = check_numbers(numbers, len(jax.devices()))
    return {number: jax.devices()[:number] for number in counts}


@contextlib.contextmanager
def explained_list() -> Iterator[None]:
    """Add a note to errors of a program that uses its list of devices as a number."""
    try:
        yield
    except TypeError as error:
        if re.search(_USED_AS_A_NUMBER, str(error)):
            error.add_note(
                f"{FORM_OF_MAKE} is given a list of devices, not their number. Write"
                " jax.sharding.Mesh(devices, 'i') for a mesh, and len(devices) for the"
                " number."
            )
        raise


def refuse_others(
    expected: Sequence[Device],
    used: frozenset[Device],
    named: str = "make({} devices)",
    remedy: str = _OF_A_LIST,
) -> None:
    """Raise unless a program used exactly the ``expected`` devices.

    Devices of another platform are ignored, because they hold values that are kept on
    the host. ``named`` and ``remedy`` are parts of the error's text.
    """
    used = frozenset(x for x in used if x.platform == expected[0].platform)
    if used == {*expected} or (len(expected) == 1 and not used):
        return
    fault = "does not say on which devices it runs"
    if used:
        names = ", ".join(sorted(map(canonical_device_name, used)))
        devices = "1 device" if len(used) == 1 else f"{len(used)} devices"
        fault = f"runs on {devices}, {names}, as its arguments, results and meshes say"
    raise ValueError(
        f"{named.format(len(expected))} {fault}. {remedy}, and return an array that"
        " lies on them."
    )


def use_what_is_given(
    programs: Mapping[int, UserProgram], lists: Mapping[int, Sequence[Device]]
) -> bool:
    """Return whether each program names exactly the devices of the list it was given.

    The programs are traced and not run.
    """
    try:
        for number, program in programs.items():
            refuse_others(lists[number], program.devices_named())
    except ValueError:
        return False
    return True
