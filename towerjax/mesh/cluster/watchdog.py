"""What ends a launcher's processes when the launcher can no longer do it?

Run by its path as the first process of the group, and outside of the launcher's, whose
death cannot take it along. All that the launcher starts has joined the group before it
lets go of the launcher's end of the pipe: the pipe ends when the launcher has, whatever
ended it, and then nobody is missing in the group.
"""

import os
import signal
import sys

if __name__ == "__main__":
    # Signals to the group are for the others.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.write(1, b"!")
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
