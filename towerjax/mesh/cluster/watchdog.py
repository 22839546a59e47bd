"""Kill a launcher's process group when the launcher has died.

The launcher runs this file as the first process of the group, and is not in the group
itself. The pipe to stdin ends when the launcher dies, however it dies; by then each
process has joined the group, since a forked one holds the pipe until it has.
"""

import os
import signal
import sys

if __name__ == "__main__":
    # Signals to the group are for the other processes.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.write(1, b"!")
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
