"""What ends a launcher's processes when the launcher can no longer do it?

Run by its path as a process of its own, which the launcher's death cannot take along.
"""

import os
import signal
import sys
from collections.abc import Iterable


def watch(lines: Iterable[bytes]) -> None:
    """Kill the process groups that are still listed when the lines end.

    The lines come through a pipe that only the launcher holds: they end when it does,
    whatever ended it.
    """
    groups: set[int] = set()
    for line in lines:
        change, group = line[:1], int(line[1:])
        if change == b"+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    # Signals sent to everything at once must not take away the one that cleans up.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    watch(sys.stdin.buffer)
