"""What a guard of transfers lets through."""

from jax._src.config import guard_lib


def asked_for():
    """May a GPU's array be read, where a guard refuses what nobody asked for?"""
    state = guard_lib.thread_local_state()
    allow = guard_lib.TransferGuardLevel.ALLOW
    return state.explicit_device_get or state.device_to_host == allow
