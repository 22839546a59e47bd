"""What should be mended here, and how? Traps that others have fallen into."""

import dataclasses

from towerjax.doctor.machine import Machine

_LEAST_SHARED_BYTES = 1 << 30


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
    """What to mend on a machine, and what to know of it.

    Args:
      machine: What is here.

    Returns:
      What is wrong comes first.

    Example:
      >>> from towerjax.doctor.machine import this_machine
      >>> ill = dataclasses.replace(this_machine(), devices=(), problem="no GPU here")
      >>> [advice] = [x for x in advice_on(ill) if x.is_wrong]
      >>> print(advice.what)
      JAX has no devices: no GPU here
    """
    found = (*_on_packages(machine), *_on_devices(machine), *_on_options(machine))
    return tuple(sorted(found, key=lambda advice: not advice.is_wrong))


def _on_packages(machine: Machine) -> list[Advice]:
    found = []
    for name in ("flax", "optax", "chex"):
        if machine.versions.get(name) is None:
            fix = f"pip install {name}"
            found.append(Advice(True, f"{name} is not installed.", fix))
    jax, jaxlib = (machine.versions.get(name) or "" for name in ("jax", "jaxlib"))
    if jax.split(".")[:2] != jaxlib.split(".")[:2]:
        what = f"jax {jax} and jaxlib {jaxlib} do not belong together."
        found.append(Advice(True, what, f"pip install -U 'jax=={jax}'"))
    return found


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
    if machine.options.get("jax_disable_jit"):
        what = "jax_disable_jit is on: nothing is compiled."
        found.append(Advice(True, what, "Unset JAX_DISABLE_JIT."))
    if not machine.options.get("jax_threefry_partitionable", True):
        found.append(
            Advice(
                True,
                "jax_threefry_partitionable is off: random draws depend on how arrays"
                " lie on devices.",
                "Unset JAX_THREEFRY_PARTITIONABLE.",
            )
        )
    if machine.options.get("jax_debug_nans"):
        found.append(
            Advice(
                False,
                "jax_debug_nans is on: every result is fetched and looked at.",
                "Unset JAX_DEBUG_NANS; a step refuses what is not finite by itself.",
            )
        )
    if machine.options.get("jax_enable_x64"):
        found.append(
            Advice(
                False,
                "jax_enable_x64 is on: numbers without a dtype are of 64 bits.",
                "Unset JAX_ENABLE_X64, if that is not meant.",
            )
        )
    return found
