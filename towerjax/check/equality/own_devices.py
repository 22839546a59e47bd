"""Prove that a tower of several devices gives the result that it gives on one device.

A `shard_map` within a tower adds, gathers and divides by itself. One tower's program is
traced for one device, and then for more, one axis of its mesh after another. Each two
programs are walked side by side, like a program for several numbers of devices. A tower
is given the same values in both programs, so it must return the same values.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from towerjax.check.equality.traced_passes import (
    NotTracedError,
    StepToProve,
    one_tower_programs,
)
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.prover.equality.kinds.equation_pair import (
    ProgramsDifferError,
    Scope,
    Sizes,
    failed,
)
from towerjax.prover.equality.kinds.kinds import SAME_FOR_ALL, Kind, Unknown, copy
from towerjax.prover.equality.one_tower import TowerProgram
from towerjax.prover.equality.walk.own_derivatives import has_own_derivatives
from towerjax.prover.equality.walk.walk import Walk
from towerjax.prover.programs.words import OF_DEVICES
from towerjax.step.plan import Passes
from towerjax.towers.strategies import Mirrored, on_one_group


def why_not_as_on_one_device(step: StepToProve) -> str:
    """Tell why a tower is not proved to give what it gives on one device.

    Args:
      step: A step whose towers have several devices.

    Returns:
      The reason, with a line; "" if it is proved.
    """
    try:
        return _why_not_proved(step)
    except (NotTracedError, ProgramsDifferError) as error:
        return OF_DEVICES.nouns.told(str(error))
    except Exception as error:  # A fault of the proof must not end a user's training.
        return failed(error)


def _why_not_proved(step: StepToProve) -> str:
    passes = step.plan.passes
    if not passes.is_of_one_loss:
        return _of_passes(step, passes)
    alone = passes.changed(differentiates=False)
    why = _of_passes(step, alone)
    if why or not _has_own_derivatives(step, alone):
        return why
    return _of_passes(step, passes)


def _has_own_derivatives(step: StepToProve, passes: Passes) -> bool:
    """Look in the passes for a custom_jvp or custom_vjp that the user wrote."""
    programs = one_tower_programs(step, passes, on_one_group(step.strategy, 1))
    return any(has_own_derivatives(x.jaxpr) for x in programs)


def _of_passes(step: StepToProve, passes: Passes) -> str:
    """Tell why some pass differs between two numbers of devices; "" if none does."""
    sizes = [*_growing_sizes(step.strategy.placement.within)]
    columns = [
        one_tower_programs(step, passes, _on_devices(step, within)) for within in sizes
    ]
    numbers = [math.prod(size for _, size in within) for within in sizes]
    bound = frozenset([DEVICE_AXIS, step.strategy.placement.axis_name])
    for of_pass in zip(*columns, strict=True):
        pairs = itertools.pairwise(zip(numbers, of_pass, strict=True))
        for (few, first), (more, second) in pairs:
            if why := _of_pair(first, second, (few, more), bound):
                return why
    return ""


def _growing_sizes(
    within: tuple[tuple[str, int], ...],
) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the sizes of the axes within a tower, from one device to all of them."""
    for grown in range(len(within) + 1):
        if not grown or within[grown - 1][1] > 1:
            later = [(name, 1) for name, _ in within[grown:]]
            yield (*within[:grown], *later)


def _on_devices(step: StepToProve, within: tuple[tuple[str, int], ...]) -> Mirrored:
    """Make a strategy of one tower whose axes have the sizes in ``within``."""
    whole = on_one_group(step.strategy, 1)
    number = math.prod(size for _, size in within)
    names = whole.placement.devices[:number]
    # ``rows`` names the axis along which the compiler splits a tower's rows. It is left
    # out, because it changes no number, and a tower of one device has no such axis.
    return dataclasses.replace(whole, devices=names, within=within, rows=None)


def _of_pair(
    first: TowerProgram,
    second: TowerProgram,
    numbers: tuple[int, int],
    bound: frozenset[str],
) -> str:
    """Tell why two programs of a tower differ; "" if they do not.

    The programs are for two ``numbers`` of a tower's devices. ``bound`` are the names
    of the towers' axes, along which there is one tower.
    """
    few, more = numbers
    walk = Walk(Sizes(numbers, (more, few)), (), has_keys=False)
    ins = [copy() for _ in first.jaxpr.in_avals]
    outs = walk.closed(first.jaxpr, second.jaxpr, ins, Scope(within=bound))
    avals = zip(first.jaxpr.out_avals, second.jaxpr.out_avals, strict=True)
    for value, (one, other) in zip(outs, avals, strict=True):
        is_same = isinstance(value, SAME_FOR_ALL) and not value.power
        if not (is_same and one.shape == other.shape):
            return _told(value)
    return ""


def _told(value: Kind) -> str:
    """Tell the reason for a value that differs between numbers of devices."""
    if isinstance(value, Unknown):
        return OF_DEVICES.nouns.told(
            OF_DEVICES.of_unknown(value.why, value.reason, None)
        )
    if not value.power:
        return OF_DEVICES.nouns.told(f"it is {value}")
    factor = OF_DEVICES.of_power(value.power, None)
    line = getattr(value.power, "line", "")
    return f"it is {factor}, since a factor at {line}" if line else f"it is {factor}"
