"""Meetings of the processes of a run, at which they agree who is left."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from towerjax.mesh import live
from towerjax.mesh.cluster import heartbeat
from towerjax.mesh.processes import Exchange

# The seconds between two meetings, and the share of the time that copies may take.
_APART_S = 1.0
_SHARE = 0.01
_RUNS = itertools.count()  # all processes of a job call `run` equally often


class AgreedLossError(live.LostError):
    """Raised on all processes that are left, which have agreed on who was lost."""


class PeerFailedError(RuntimeError):
    """Another process of the run has failed; names it, and its error."""


class Meetings:
    """The meetings of some processes, each of which comes to all of them.

    Attributes:
      members: The numbers of the processes that are left.
    """

    def __init__(self, members: Iterable[int]) -> None:
        self.members = tuple(members)
        self._name = f"meeting/{next(_RUNS)}"
        self._exchange: Exchange | None = None

    def meet(self, told: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Gather what each process tells, without those that were lost.

        All that are left get the same answer. It also reports a step to the launcher,
        for which a process that waits would hang.
        """
        heartbeat.notify_launcher(heartbeat.STEP)
        if len(self.members) == 1:
            return {self.members[0]: dict(told)}
        if self._exchange is None:
            name = f"{self._name}/{'.'.join(map(str, self.members))}"
            waits_for = "process {}, at a meeting of the run's processes"
            self._exchange = Exchange(name, waits_for, self.members)
        of_all = self._exchange.gather_from_left(told)
        if jax.process_index() not in of_all:
            live.end_given_up()
        if lost := set(self.members) - of_all.keys():
            live.leave_out(lost)
            self.members = tuple(of_all)
            self._exchange = None
        return of_all


@dataclasses.dataclass
class Pace:
    """When a run's processes meet next, and when they copy the state.

    Attributes:
      every: Copy after each step whose number is a multiple of this; None copies as
        often as takes 1 % of the time.
      copy_s: How long the last copy took.
      copied_s: When it was made, in the seconds of a clock.
    """

    every: int | None = None
    copy_s: float = 0.0
    copied_s: float = 0.0
    _number: int = 0
    _met_s: float | None = None
    _apart: int = 1

    def next_meeting(self, number: int, now_s: float) -> tuple[int, bool]:
        """Choose the step of the next meeting, and whether to copy the state there.

        ``number`` is the step of this meeting, and ``now_s`` its time. Meetings are
        some 1 s apart. At first steps are compiled, so these come slowly to that.
        """
        steps = number - self._number
        each_s = 0.0
        if self._met_s is None or steps <= 0:
            self._apart = 1
        else:
            each_s = (now_s - self._met_s) / steps
            fitting = int(_APART_S / max(each_s, 1e-6))
            self._apart = min(max(fitting, 1), 2 * self._apart)
        self._number = number
        self._met_s = now_s
        at = number + self._apart
        if self.every is not None:
            due = number - number % self.every + self.every
            return min(at, due), at >= due
        since_s = now_s + self._apart * each_s - self.copied_s
        return at, self.copy_s <= _SHARE * since_s
