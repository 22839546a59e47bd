"""Any JAX program: whether its results depend on the number of devices."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from towerjax.proof.equation import all_sites, named_axes, user_line
from towerjax.step.look.comparison import (
    AuditReport,
    Compared,
    Finding,
    Leaves,
    SplitError,
    judge,
    refuse_random,
    rounding_of,
)
from towerjax.step.look.run_towers import as_reals, rounded
from towerjax.tools.testing.programs import traced_program
from towerjax.types import PyTree, named_leaves
from towerjax.types.door import door
from towerjax.types.leaves import key_data, listed
from towerjax.types.options import check_function, check_number, check_wholes


@door
def same_on_devices(
    make: Callable[[int], tuple[Callable[..., Any], Sequence[Any]]],
    devices: Sequence[int] = (1, 2, 4),
    *,
    rtol: float | None = None,
) -> AuditReport:
    """Raise if what a program returns depends on the number of devices.

    The program is made and run for each number; results are compared leaf by leaf with
    those on one device, as an audit compares: whole where they are split over devices,
    each copy where `jax.pmap` returns one of each device, and keys by their data.

    Args:
      make: ``number of devices -> (fn, args)``, with the same global arguments for each
        number; ``fn`` by ``jit``, ``shard_map``, ``pmap``, or a step. It may donate.
      devices: The numbers; the first is 1.
      rtol: As for `assert_replicates`.

    Returns:
      An `AuditReport`.

    Raises:
      SplitError: A leaf depends on it: with both numbers, their factor where it is the
        number of devices or one over it, and the lines that communicate.
      ValueError: There are not so many devices, or the program is not deterministic.

    Example:
      >>> import numpy as np
      >>> def make(devices):
      ...     mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), "i")
      ...     mean = lambda x: jax.lax.pmean(x.mean(), "i")
      ...     specs = {"in_specs": jax.P("i"), "out_specs": jax.P()}
      ...     return jax.shard_map(mean, mesh=mesh, **specs), [np.arange(8.0)]
      >>> same_on_devices(make, devices=(1, 2)).compared
      ('result',)
    """
    check_function("make", make, "make(devices)")
    numbers, here = check_wholes("devices", devices), len(jax.devices())
    if rtol is not None:
        check_number("rtol", rtol, "a number >= 0, or None")
    if numbers[0] != 1 or len(numbers) < 2 or max(numbers) > here:
        raise ValueError(
            f"devices={devices!r} must be 1 and other numbers, of at most {here}"
            ' devices. On CPUs say jax.config.update("jax_num_cpu_devices",'
            f" {max(numbers)}) before JAX is used."
        )
    fn, args = make(numbers[-1])
    jaxpr, _ = traced_program(fn, tuple(args), {})
    rounding, want = rounding_of([jaxpr]), _leaves_on(*make(1))

    @functools.cache
    def nearby() -> list[Leaves]:
        refuse_random(_leaves_on(*make(1)), want)
        by = rounding / 8 if rounding > 1e-4 else 2.0**-23
        return [_leaves_on(*make(1), by=step * by) for step in (1, -1, 2)]

    runs = []
    for number in numbers[1:]:
        got = _leaves_on(*make(number))
        if names := sorted(got.keys() ^ want.keys()):
            raise ValueError(
                f"On 1 and {number} devices results differ: {listed(names)}."
            )
        pairs = {name: _alike(got[name], want[name]) for name in want}
        got, single = ({name: x[i] for name, x in pairs.items()} for i in (0, 1))
        runs.append(Compared(number, "", got, single, nearby))
    try:
        report = judge(runs, 0, rounding if rtol is None else rtol)
    except SplitError as error:
        differing = [dataclasses.replace(x, of="devices") for x in error.findings]
        raise SplitError(differing, _reasons(differing, jaxpr)) from None
    return dataclasses.replace(report, of="devices")


def _leaves_on(fn: Callable[..., Any], args: Sequence[Any], by: float = 0.0) -> Leaves:
    """The results by their names; of arguments that are rounded, where ``by`` says."""

    def near(x: Any) -> Any:
        changed = rounded(x, by, only_broken=True)
        is_placed = isinstance(x, jax.Array) and changed is not x
        return jax.device_put(changed, x.sharding) if is_placed else changed

    out = fn(*(jax.tree.map(near, args) if by else args))
    return dict(_numbers(out))


def _numbers(out: PyTree) -> Iterator[tuple[str, Any]]:
    for name, x in named_leaves("result", out):
        if isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex):
            number: Any = x
            yield name, as_reals(key_data(number))


def _alike(got: Any, want: Any) -> tuple[Any, Any]:
    """Both in one shape: rows that `jax.pmap` has split are joined, copies are many."""
    if got.size == want.size and got.shape[2:] == want.shape[2:]:
        return got.reshape(want.shape), want
    is_of_copies = got.ndim == want.ndim > 0 and want.shape[0] == 1
    if is_of_copies and got.shape[1:] == want.shape[1:]:
        want = np.broadcast_to(want, got.shape)
    return got, want


def _reasons(findings: Sequence[Finding], jaxpr: Any) -> Iterator[str]:
    """What the numbers say, and the lines that communicate."""
    for text, is_inverse in ((_TIMES, False), (_OVER, True)):
        names = [x.leaf for x in findings if _is_factor(x, is_inverse)]
        if names:
            yield f"{listed(names)}: {text}"
    sites = [site for site in all_sites(jaxpr) if named_axes(site[0])]
    lines = [(user_line(x), x[0].primitive.name) for x in sites]
    if at := list(dict.fromkeys(f"{line} ({how})" for line, how in lines if line)):
        yield f"Devices communicate at {'; '.join(at[:3])}."


def _is_factor(finding: Finding, is_inverse: bool) -> bool:
    factor = 1 / finding.towers if is_inverse else finding.towers
    expected = factor * finding.one_tower
    return abs(finding.value - expected) <= 1e-4 * abs(expected) > 0


_TIMES = (
    "as many times as much as there are devices: a sum of what is a mean, or of what is"
    " the same on all (with check_vma=True jax.grad adds up over devices by itself)."
)
_OVER = "its share on one device: a mean of what is to be added up."
