"""What can a machine do? Peaks, memory and links, each figure with its source."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Link:
    """How a device reaches others.

    Attributes:
      bandwidth: Bytes a second that one device sends, in one direction.
      latency_s: Of one hop of a ring.
    """

    bandwidth: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device, and how many of them are joined.

    Attributes:
      name: Its own.
      peak: ``(dtype of the operands, FLOP/s)`` of matrix products, without sparsity.
      memory_bytes: Of a device.
      memory_bandwidth: Bytes a second.
      devices_per_node: So many are joined by ``node``.
      node: The link between them; None where there was none to measure.
      network: The link between nodes, a device's share; None where there is none.
      matmul_efficiency: Which part of the peak products reach. An assumption.
      memory_efficiency: Which part of the bandwidth. An assumption.
      link_efficiency: Which part of the links' bandwidth. An assumption.
      step_overhead_s: What any step takes; 0 where it was not measured.
      sources: ``(which figures, where they are from)``.

    Raises:
      ValueError: A figure is not above 0, or an efficiency not in (0, 1].

    Example:
      >>> dict(Hardware.named("H100").peak)["bfloat16"]
      989400000000000.0
    """

    name: str
    peak: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bandwidth: float
    devices_per_node: int
    node: Link | None
    network: Link | None
    matmul_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    step_overhead_s: float = 0.0
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Check the figures."""
        figures = {f"peak of {dtype}": flops for dtype, flops in self.peak}
        for name in ("memory_bytes", "memory_bandwidth", "devices_per_node"):
            figures[name] = getattr(self, name)
        for name, link in (("node", self.node), ("network", self.network)):
            if link is not None:
                figures[f"{name}.bandwidth"] = link.bandwidth
        parts = {
            name: getattr(self, name)
            for name in ("matmul_efficiency", "memory_efficiency", "link_efficiency")
        }
        wrong = [f"{name}={x!r}" for name, x in figures.items() if not x > 0]
        wrong += [f"{name}={x!r}" for name, x in parts.items() if not 0 < x <= 1]
        if wrong:
            raise ValueError(
                f"Hardware {self.name!r} has {', '.join(wrong)}. Figures are above 0,"
                " and efficiencies at most 1."
            )

    def peak_of(self, dtype: str) -> float:
        """FLOP/s of products of this dtype.

        Args:
          dtype: Of the operands, ``"bfloat16"``.

        Raises:
          ValueError: There is no figure.
        """
        peaks = dict(self.peak)
        if dtype not in peaks:
            raise ValueError(
                f"{self.name} has no peak for products of {dtype}, only for"
                f" {', '.join(peaks)}. Add one: dataclasses.replace(hardware,"
                f" peak=(*hardware.peak, ({dtype!r}, flops_per_second)))."
            )
        return peaks[dtype]

    @staticmethod
    def named(name: str) -> "Hardware":
        """One of the kinds that are known here.

        Args:
          name: ``"A100"``, ``"H100"``, ``"H200"`` or ``"TPU v5e"``.

        Raises:
          ValueError: Another name.
        """
        for hardware in _KNOWN:
            if hardware.name == name:
                return hardware
        known = ", ".join(repr(hardware.name) for hardware in _KNOWN)
        raise ValueError(
            f"hardware={name!r} is not known here: {known}, 'here' to measure these"
            " devices, or a tj.tools.Hardware of your own."
        )


_ASSUMED = (
    "latencies and efficiencies",
    "assumed, not from a data sheet; measure yours with hardware='here'",
)
_TF32 = (
    "float32",
    "TF32 tensor cores, which JAX's default precision uses",
)
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-nvidia-us-2188504-web.pdf"
)
_H100 = "https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_HOPPER_PEAK = (
    ("bfloat16", 989.4e12),
    ("float16", 989.4e12),
    ("float32", 494.7e12),
    ("float64", 67e12),
    ("float8_e4m3fn", 1978.9e12),
    ("float8_e5m2", 1978.9e12),
    ("int8", 1978.9e12),
)
_DGX_HOPPER = (
    "network",
    "DGX: one ConnectX-7 of 400 Gb/s a GPU; https://docs.nvidia.com/dgx/dgxh100-user-"
    "guide/introduction-to-dgxh100.html",
)


def _hopper(name: str, memory_bytes: float, bandwidth: float, page: str) -> Hardware:
    """One of the two that differ in their memory."""
    figures = "SXM: peaks (half of those with sparsity), memory, NVLink 900 GB/s"
    return Hardware(
        name=name,
        peak=_HOPPER_PEAK,
        memory_bytes=memory_bytes,
        memory_bandwidth=bandwidth,
        devices_per_node=8,
        node=Link(bandwidth=450e9, latency_s=3e-6),
        network=Link(bandwidth=50e9, latency_s=8e-6),
        sources=((figures, page), _DGX_HOPPER, _TF32, _ASSUMED),
    )


_KNOWN = (
    Hardware(
        name="A100",
        peak=(
            ("bfloat16", 312e12),
            ("float16", 312e12),
            ("float32", 156e12),
            ("float64", 19.5e12),
            ("int8", 624e12),
        ),
        memory_bytes=80e9,
        memory_bandwidth=2039e9,
        devices_per_node=8,
        node=Link(bandwidth=300e9, latency_s=3e-6),
        network=Link(bandwidth=25e9, latency_s=8e-6),
        sources=(
            ("SXM, 80 GB: peaks, memory, NVLink 600 GB/s both ways", _A100),
            (
                "network",
                "DGX: one HDR InfiniBand of 200 Gb/s a GPU; https://docs.nvidia.com/"
                "dgx/dgxa100-user-guide/introduction-to-dgxa100.html",
            ),
            _TF32,
            _ASSUMED,
        ),
    ),
    _hopper("H100", 80e9, 3350e9, _H100),
    _hopper("H200", 141e9, 4800e9, _H200),
    Hardware(
        name="TPU v5e",
        peak=(("bfloat16", 197e12), ("float32", 197e12), ("int8", 393e12)),
        memory_bytes=16e9,
        memory_bandwidth=819e9,
        devices_per_node=256,
        node=Link(bandwidth=200e9, latency_s=1e-6),
        network=Link(bandwidth=3.125e9, latency_s=20e-6),
        sources=(
            (
                "peaks, memory, links of 1,600 Gb/s one way, pod of 256 chips, which"
                " share a network of 6.4 Tb/s",
                "https://cloud.google.com/tpu/docs/v5e",
            ),
            ("float32", "one bfloat16 pass, which is JAX's default precision on TPUs"),
            _ASSUMED,
        ),
    ),
)
