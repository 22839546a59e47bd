"""What should be mended here, and how? Traps that others have fallen into."""

import dataclasses

from towerjax.tools.doctor.machine import Machine

_LEAST_SHARED_BYTES = 1 << 30
_OPTIONS = (  # an option, the value to tell of, is it wrong, why, what to do besides
    ("jax_disable_jit", True, True, "nothing is compiled", ""),
    (
        "jax_threefry_partitionable",
        False,
        True,
        "random draws depend on how arrays lie on devices",
        "",
    ),
    (
        "jax_debug_nans",
        True,
        False,
        "every result is fetched and looked at",
        "; a step refuses what is not finite by itself",
    ),
    (
        "jax_enable_x64",
        True,
        False,
        "numbers without a dtype are of 64 bits",
        ", if that is not meant",
    ),
)


@dataclasses.dataclass(frozen=True)
class Advice:
    """One thing to mend, or to know.

    Attributes:
      is_wrong: Must it be mended? Else it may be meant so.
      what: What was found.
      fix: What to do.
    """

    is_wrong: bool
    what: str
    fix: str

    def __str__(self) -> str:
        """Two lines."""
        return f"{'wrong' if self.is_wrong else 'note'}: {self.what}\n  do: {self.fix}"


def advice_on(machine: Machine) -> tuple[Advice, ...]:
    """What to mend on a machine, and what to know of it."""
    found = (*_on_devices(machine), *_on_options(machine))
    return tuple(sorted(found, key=lambda advice: not advice.is_wrong))


def _on_devices(machine: Machine) -> list[Advice]:
    if not machine.devices:
        what = f"JAX has no devices: {machine.problem}"
        platforms = machine.environment.get("JAX_PLATFORMS")
        fix = "Install JAX for this machine's accelerator, pip install 'jax[cuda13]'."
        if platforms:
            fix = f"Unset JAX_PLATFORMS, which is {platforms!r}. {fix}"
        return [Advice(True, what, fix)]
    if machine.platform == "cpu":
        return _on_cpu_devices(machine)
    return _on_accelerators(machine)


def _on_cpu_devices(machine: Machine) -> list[Advice]:
    found = []
    own = [d for d in machine.devices if d.process == machine.devices[0].process]
    if machine.nvidia:
        what = "The machine has an NVIDIA GPU, but JAX computes on the CPU."
        fix = "pip install 'jax[cuda13]'"
        if machine.environment.get("JAX_PLATFORMS"):
            fix = "Unset JAX_PLATFORMS, if that is not meant."
        found.append(Advice("JAX_PLATFORMS" not in machine.environment, what, fix))
    if len(machine.devices) == 1:
        found.append(
            Advice(
                False,
                "There is one CPU device, so nothing travels between devices.",
                "To try several, set JAX_NUM_CPU_DEVICES=8.",
            )
        )
    if len(own) > machine.cpus:
        found.append(
            Advice(
                False,
                f"{len(own)} CPU devices share {machine.cpus} processors: good for"
                " tests, but times say nothing about scaling.",
                "For speed take as many devices as there are processors, or fewer.",
            )
        )
    return found


def _on_accelerators(machine: Machine) -> list[Advice]:
    found = []
    kinds = sorted({device.kind for device in machine.devices})
    if len(kinds) > 1:
        found.append(
            Advice(
                False,
                f"The devices are of several kinds, {', '.join(kinds)}; the slowest"
                " sets the pace of all.",
                "Name those of one kind: tj.Mirrored(devices=...).",
            )
        )
    shared = machine.shared_memory_bytes
    several = len(machine.devices) > 1 and machine.platform == "gpu"
    if several and shared is not None and shared < _LEAST_SHARED_BYTES:
        found.append(
            Advice(
                True,
                f"/dev/shm has {shared >> 20} MiB, too little for NCCL to send between"
                f" {len(machine.devices)} GPUs.",
                "Start the container with --shm-size=8g, or --ipc=host.",
            )
        )
    return found


def _on_options(machine: Machine) -> list[Advice]:
    found = []
    if "xla_force_host_platform_device_count" in machine.environment.get(
        "XLA_FLAGS", ""
    ):
        found.append(
            Advice(
                False,
                "XLA_FLAGS says how many CPU devices there are, the old way.",
                "Set JAX_NUM_CPU_DEVICES in its place; JAX refuses both together.",
            )
        )
    for option, value, is_wrong, why, besides in _OPTIONS:
        if bool(machine.options.get(option, not value)) is value:
            what = f"{option} is {'on' if value else 'off'}: {why}."
            fix = f"Unset {option.upper()}{besides}."
            found.append(Advice(is_wrong, what, fix))
    return found
