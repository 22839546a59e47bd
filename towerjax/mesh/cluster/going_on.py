"""When does a job go on after the end of its processes, and with how many?"""

import dataclasses
import signal

# What a program says that has saved itself and is to be started again: EX_TEMPFAIL.
AGAIN = 75


@dataclasses.dataclass(frozen=True)
class End:
    """How the processes of a job ended."""

    code: int  # 0, or the code of the first that failed; 128 + n for signal n
    lost: int = 0  # how many were killed by others than the launcher, or stood still
    told: int | None = None  # the signal by which the launcher was told to end
    # Whether the launcher asked them to end, because more of them fit again.
    asked: bool = False


@dataclasses.dataclass(frozen=True)
class GoingOn:
    """How many processes may be started now, and how often again."""

    processes: int  # how many there are where none is lost
    divided: int  # as many processes fit as divide this
    restarts: int | None = None  # how many losses the job may still have
    regrow_s: float = 60.0  # seconds until the place of a lost process is used again
    # When each place that is left alone may be used again.
    free_at: tuple[float, ...] = ()

    def count(self, now: float) -> int:
        """The largest number of processes that has places and fits; at least one."""
        places = self.processes - sum(at > now for at in self.free_at)
        return max(n for n in range(1, max(places, 1) + 1) if self.divided % n == 0)

    def grows_at(self, count: int) -> float | None:
        """From when on more than so many fit; None if never."""
        times = (at for at in sorted(self.free_at) if self.count(at) > count)
        return next(times, None)

    def after(self, end: End, now: float) -> "GoingOn | None":
        """What goes on after an end; None if nothing does."""
        if not end.code or end.told:
            return None
        if not end.lost and end.asked and end.code in (AGAIN, 128 + signal.SIGTERM):
            return self
        if not self.restarts or not (end.lost or end.code == AGAIN):
            return None
        lost = (now + self.regrow_s,) * end.lost
        free_at = tuple(at for at in self.free_at if at > now) + lost
        return dataclasses.replace(self, restarts=self.restarts - 1, free_at=free_at)

    def code(self, end: End) -> int:
        """The exit code of a job that does not go on."""
        if end.told and end.code not in (0, AGAIN):
            return 128 + end.told
        return AGAIN if end.lost and self.restarts is not None else end.code
