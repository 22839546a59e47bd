"""Is that port free? Asked before JAX, which ends the process when it is not."""

import socket

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port of the loopback interface that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def split_address(address: str) -> tuple[str, int]:
    """Host, without the brackets of an IPv6 one, and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach that address."""
    host, _ = split_address(address)
    return host in ("localhost", "::1") or host.startswith("127.")


def is_free(port: int) -> bool:
    """Whether a process of this machine could listen at that port.

    JAX's own server would share a port with another job's, and end the process where
    it may not.
    """
    with socket.socket() as probe:
        # A port whose last job has just ended may be used again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def someone_listens(address: str, timeout_s: float) -> OSError | None:
    """None where a connection to that address succeeds, else why it does not."""
    try:
        socket.create_connection(split_address(address), timeout_s).close()
    except OSError as error:
        return error
    return None
