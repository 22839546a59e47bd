"""The peak of a device's arithmetic, by its kind."""

from towerjax.mesh.placement import Placement

# FLOP/s of one device, for dense products of bfloat16 that are added in float32. Above
# each number stands the title of its source, and where the number was read. NVIDIA's
# sheets give twice the number, for matrices of which half is 0 ("with sparsity"). If a
# device's kind begins with several of these names, the first one counts.
_PEAKS = {
    # "NVIDIA H100 Tensor Core GPU Datasheet" has 1,979 TFLOPS (SXM) and 1,513 (PCIe)
    # with sparsity. It was read in a vendor's copy. NVIDIA's TensorRT-LLM names this
    # sheet for 989 and 756.
    "NVIDIA H100 PCIe": 756.5e12,
    # "NVIDIA H100 NVL Datasheet" has 1,671 with sparsity. It was read where others
    # quote it.
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100": 989.5e12,
    # "NVIDIA H200 Tensor Core GPU", the product's page, has 1,979 (SXM) and 1,671 (NVL)
    # with sparsity. It was read where others quote it.
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H200": 989.5e12,
    # "NVIDIA GH200 Grace Hopper Superchip Datasheet" has 1,979 TFLOPS with sparsity. It
    # was read where others quote its table.
    "NVIDIA GH200": 989.5e12,
    # "NVIDIA Blackwell Datasheet" has 4.5 PFLOPS with sparsity for HGX B200. It was
    # read in a copy.
    "NVIDIA B200": 2250e12,
    # "NVIDIA A100 Tensor Core GPU Datasheet" has 312, as TensorRT-LLM says.
    "NVIDIA A100": 312e12,
    # Google's Cloud TPU docs have "Peak compute per chip" on the pages "TPU v4", "TPU
    # v5e", "TPU v5p" and "TPU v6e", which were read there. A chip is a device.
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
_TOPOLOGIES = {"v4:": "TPU v4", "v5e:": "TPU v5e", "v5p:": "TPU v5p", "v6e:": "TPU v6e"}
# These kinds begin like another one but have a lower peak: a part of a GPU, and a TPU.
_LESS = (" MIG ", "TPU v4 lite")


def peak_flops_of(kind: str) -> float | None:
    """Look up the FLOP/s of a device of this kind; None if they are not known.

    A kind is a name such as "NVIDIA H200", or a topology of TPUs.
    """
    for topology, name in _TOPOLOGIES.items():
        if kind.startswith(topology):
            return _PEAKS[name]
    if any(name in kind for name in _LESS):
        return None
    return next((peak for name, peak in _PEAKS.items() if kind.startswith(name)), None)


def peak_flops_of_all(placement: Placement, of_one: float | None) -> float | None:
    """Add up the FLOP/s of a strategy's devices; None if unknown.

    ``of_one`` is the number for one device, or None to look it up.
    """
    absent = placement.absent
    if of_one is None and absent is not None:
        of_one = peak_flops_of(absent.kind)
    elif of_one is None:
        peaks = [peak_flops_of(x.device_kind) for x in placement.jax_devices]
        known = [x for x in peaks if x is not None]
        return sum(known) if len(known) == len(peaks) else None
    return None if of_one is None else of_one * len(placement.devices)
