"""What does an exit code of ``towerjax`` mean? The same for every command."""

OK = 0
"""All went well."""

NOT_SO = 1
"""The command ran, and the answer is no: a finding, a failed run."""

WRONG = 2
"""Wrong arguments, or a value that cannot be; nothing was done."""

NOT_STARTED = 126
"""The system refused a file or a program."""

INTERRUPTED = 128 + 2
"""Ctrl-C, as if SIGINT had ended the process."""

CLOSED = 128 + 13
"""Whoever read the output is gone, as if SIGPIPE had ended the process."""
