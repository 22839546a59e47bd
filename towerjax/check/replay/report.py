"""What a replay found: the device that others outvote, and what has no vote."""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from towerjax.mesh.placement import Placement
from towerjax.step.state.nonfinite import towers_text
from towerjax.types.refusals import Portable, listed

FLAG = "XLA_FLAGS=--xla_gpu_deterministic_ops=true"


@dataclasses.dataclass(frozen=True)
class WrongBits:
    """Bits of one leaf that differed between devices that computed the same.

    Attributes:
      devices: The device that two others outvote. If it is several devices, at least
        one of them is wrong: without a majority, or if devices of one tower exchange
        values.
      towers: The towers that these devices ran.
      part: The part of the step: "loss", "gradient", "metric" or "value" of a tower, or
        "update" for the next state, which each device computes for itself.
      leaf: The leaf's name, such as "params/w".
    """

    devices: tuple[str, ...]
    towers: tuple[int, ...]
    part: str
    leaf: str

    def __str__(self) -> str:
        where = f"{self.part} {self.leaf} of {towers_text(self.towers)}"
        return f"{' or '.join(self.devices)} in {where}"


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """What a replay of a step found; ``print`` shows it as a text.

    Attributes:
      step: The number of the step that was replayed, counted from 1.
      devices: The devices that were compared.
      wrong: A `WrongBits` for each leaf in which two devices outvote a third.
      undecided: A `WrongBits` for each leaf without a majority.
      unstable: A `WrongBits` for each leaf that was not the same when the same device
        computed it twice.
      shared: The leaves, as "part leaf", that differed on every device, or on several
        that exchange values in the update. A vote on these names no device.
    """

    step: int
    devices: tuple[str, ...]
    wrong: tuple[WrongBits, ...] = ()
    undecided: tuple[WrongBits, ...] = ()
    unstable: tuple[WrongBits, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether all bits were the same."""
        return not (self.wrong or self.undecided or self.unstable or self.shared)

    @property
    def is_deterministic(self) -> bool:
        """Whether each device gave the same bits when it computed the same twice."""
        return not self.unstable

    @property
    def named(self) -> tuple[str, ...]:
        """The devices that were outvoted, each by itself, in the order of `devices`."""
        alone = [x.devices for x in self.wrong if len(x.devices) == 1]
        named = {device for [device] in alone}
        return tuple(x for x in self.devices if x in named)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        among = f"{len(self.devices)} devices in step {self.step}"
        if self.agrees:
            yield f"All bits are the same on neighbouring devices: {among}."
            return
        yield f"Bits differ among {among}."
        if self.unstable:
            yield (
                "A device that computed the same twice gave other bits:"
                f" {_few(self.unstable)}. So kernels are not deterministic, and no"
                f" device is blamed. On GPUs set {FLAG}. If only one device still"
                " differs from itself, it is at fault, or a callback is."
            )
        if self.wrong:
            yield f"Two devices outvote a third: {_few(self.wrong)}."
        if self.undecided:
            yield (
                f"One of these is wrong, without a majority: {_few(self.undecided)}. A"
                " vote needs three devices of a process, of which one is wrong."
            )
        if self.shared:
            yield (
                f"A vote on {listed(self.shared)} names no device: it differs on all,"
                " or devices exchange values in the update, so that a wrong one changes"
                " others. On GPUs a program may also be tuned in another way for other"
                f" devices: set {FLAG}."
            )


def _few(found: Sequence[WrongBits]) -> str:
    more = len(found) - 4
    return "; ".join(map(str, found[:4])) + f"; and {more} more" * (more > 0)


class CorruptionError(Portable, RuntimeError):
    """Devices that computed the same gave different bits, so one of them is wrong.

    Attributes:
      report: The `ReplayReport`, which names devices, towers and leaves.
      checkpoint: The step number of the newest checkpoint that was saved before the
        last replay that agreed; None if there is none.

    Example:
      >>> at = WrongBits(("cpu:5",), (5,), "gradient", "params/w")
      >>> report = ReplayReport(131, tuple(f"cpu:{i}" for i in range(8)), wrong=(at,))
      >>> error = CorruptionError(report, 100)
      >>> str(error).splitlines()[1]
      'Two devices outvote a third: cpu:5 in gradient params/w of tower 5.'
      >>> error.report.named, error.checkpoint
      (('cpu:5',), 100)
    """

    def __init__(self, report: ReplayReport, checkpoint: int | None = None) -> None:
        super().__init__(f"{report}\n{_advice(report, checkpoint)}")
        self.report = report
        self.checkpoint = checkpoint


def _advice(report: ReplayReport, checkpoint: int | None) -> str:
    leave_out = "Leave that device out, with tj.Mirrored(devices=...)."
    if len(report.named) != 1:
        leave_out = "Test these devices, and leave out the wrong one."
    good = (
        "No checkpoint is known to be good, because no replay of this run agreed after"
        " one was saved."
    )
    if checkpoint is not None:
        good = (
            f"The last good checkpoint is that of step {checkpoint}: a replay agreed at"
            " that step or later. Later checkpoints may be wrong, so move them out of"
            " the folder."
        )
    return f"The step was not run. {good} {leave_out}"


@dataclasses.dataclass(frozen=True)
class Prints:
    """The fingerprints that one run of a pass or of the update gave.

    Attributes:
      names: The part and the name of each of ``M`` leaves.
      table: ``[devices of a tower, rows, M]``, with a row for each tower, or in an
        update for each place of a device.
    """

    names: tuple[tuple[str, str], ...]
    table: np.ndarray


@dataclasses.dataclass(frozen=True)
class Station:
    """What is compared together: a pass, or the update.

    Attributes:
      names: As in `Prints`.
      runs: For each rotation of the devices the tables of its runs: one, or two if it
        ran a second time on the same devices.
      exchanges: Whether devices may exchange what they compute. One wrong device then
        changes what the others have.
    """

    names: tuple[tuple[str, str], ...]
    runs: list[list[np.ndarray]]
    exchanges: bool

    @property
    def agrees(self) -> bool:
        """Whether all runs have the same fingerprints."""
        first, *others = [x for runs in self.runs for x in runs]
        return all((x == first).all() for x in others)


def stations_of(
    runs: Sequence[Sequence[Sequence[Prints]]], update_exchanges: bool
) -> list[Station]:
    """Make the stations; ``runs[rotation][run]`` has the `Prints` of each.

    The last station is the update. In the others towers hear only themselves.
    """
    stations = []
    for i, prints in enumerate(runs[0][0]):
        tables = [[run[i].table for run in of_rotation] for of_rotation in runs]
        is_update = i == len(runs[0][0]) - 1
        stations.append(Station(prints.names, tables, is_update and update_exchanges))
    return stations


class _Kind(enum.Enum):
    """What a difference says."""

    WRONG = enum.auto()  # two devices outvote a third
    UNDECIDED = enum.auto()
    UNSTABLE = enum.auto()  # a device differs from itself


_Found: TypeAlias = list[tuple[_Kind, WrongBits]]


def vote(stations: Iterable[Station], step: int, placement: Placement) -> ReplayReport:
    """Vote on each leaf of each tower and device; return what was found."""
    found: _Found = []
    shared = list[WrongBits]()
    for station in stations:
        if station.agrees:
            continue
        leaves = range(len(station.names))
        by_leaf = [_of_leaf(station, leaf, placement) for leaf in leaves]
        for of_leaf in by_leaf:
            if _is_shared(of_leaf, by_leaf, station, placement):
                shared += [bits for _, bits in of_leaf]
            else:
                found += of_leaf

    def of(kind: _Kind) -> tuple[WrongBits, ...]:
        return tuple(bits for x, bits in found if x is kind)

    names = dict.fromkeys(f"{x.part} {x.leaf}" for x in shared)
    return ReplayReport(
        step,
        placement.devices,
        wrong=of(_Kind.WRONG),
        undecided=of(_Kind.UNDECIDED),
        unstable=of(_Kind.UNSTABLE),
        shared=tuple(names),
    )


def _of_leaf(
    station: Station, leaf: int, placement: Placement
) -> list[tuple[_Kind, WrongBits]]:
    """Vote on one leaf; towers that accuse the same devices are one finding."""
    size = placement.devices_each
    towers = placement.num_towers
    rows = station.runs[0][0].shape[1]
    accusing: dict[tuple[_Kind, tuple[str, ...]], list[int]] = {}
    for row in range(rows):
        at = row * placement.num_devices // rows * size
        accused: dict[_Kind, list[str]] = {}
        for i in range(size):
            vote = _vote_on_one(
                [[x[i, row, leaf] for x in runs] for runs in station.runs]
            )
            if vote is not None:
                kind, rotations = vote
                names = [placement.rotated(by)[at + i] for by in rotations]
                names.sort(key=placement.devices.index)
                accused.setdefault(kind, []).extend(names)
        its = range(row * towers // rows, (row + 1) * towers // rows)
        for kind, names in accused.items():
            accusing.setdefault((kind, tuple(names)), []).extend(its)
    part, name = station.names[leaf]
    return [
        (kind, WrongBits(devices, tuple(its), part, name))
        for (kind, devices), its in accusing.items()
    ]


def _is_shared(
    of_leaf: _Found, by_leaf: list[_Found], station: Station, placement: Placement
) -> bool:
    """Decide whether a leaf differs where a device may have got a wrong value.

    Then a vote on it names nobody. ``by_leaf`` has what was found in each leaf of the
    station.
    """
    if not of_leaf or any(kind is _Kind.UNSTABLE for kind, _ in of_leaf):
        return False
    if station.exchanges:
        return len({bits.devices for found in by_leaf for _, bits in found}) > 1
    # One wrong device is in three places at most. If the leaf differs in all places,
    # and no device is in all of them, the programs round in different ways.
    each = placement.num_towers // placement.num_devices
    places = {tower // each for _, bits in of_leaf for tower in bits.towers}
    in_all = len(places) == placement.num_devices > 2
    return in_all and len({bits.devices for _, bits in of_leaf}) > 1


def _vote_on_one(runs: Sequence[Sequence[np.uint32]]) -> tuple[_Kind, list[int]] | None:
    """Decide what a difference says, and which rotations are accused.

    Returns None if all are the same. ``runs`` has the fingerprints of one leaf for each
    rotation, of one run or two.
    """
    unstable = [i for i, of_rotation in enumerate(runs) if len({*of_rotation}) > 1]
    if unstable:
        return _Kind.UNSTABLE, unstable
    values = [of_rotation[0] for of_rotation in runs]
    if len({*values}) == 1:
        return None
    odd = [i for i, value in enumerate(values) if values.count(value) == 1]
    if len(values) == 3 and len(odd) == 1:
        return _Kind.WRONG, odd
    return _Kind.UNDECIDED, [*range(len(values))]
