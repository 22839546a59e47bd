"""What can the devices here do? Measured: products, memory, all-reduce, overhead."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.mesh.devices import canonical_device_name, canonical_device_names
from towerjax.mesh.placement import DEVICE_AXIS, Placement, place
from towerjax.tools.report.hardware import Hardware, Link
from towerjax.towers.executors import jit_on_devices, over_devices
from towerjax.types import Layout

_CHAIN = 6  # products one after the other, so that the call itself weighs little


def measure_hardware(
    devices: Sequence[Any] | None = None,
    *,
    dtypes: Sequence[str] = ("float32",),
    matmul_size: int = 512,
    link_bytes: int = 1 << 22,
    repeats: int = 5,
) -> Hardware:
    """What these devices reach while all of them are busy.

    Products of square matrices, as a dense layer and its gradients have, a pass over an
    array, an all-reduce of many bytes and of four, and an empty step; the median of
    some calls each. Figures are reached ones, so that efficiencies are 1. All devices
    count as one node.

    Args:
      devices: Names or devices; None is all there are.
      dtypes: For which a peak is measured.
      matmul_size: Of the matrices; larger ones reach more.
      link_bytes: Of the large all-reduce, and of the array that is passed over.
      repeats: How many calls.

    Returns:
      A ``Hardware``, by the name ``"here"``. Without a link where there is one device.

    Raises:
      ValueError: A device is not on this machine.

    Example:
      >>> here = measure_hardware(("cpu:0",), matmul_size=32, repeats=1)
      >>> here.name, here.node
      ('here', None)
    """
    names = (
        tuple(canonical_device_name(device) for device in jax.devices())
        if devices is None
        else canonical_device_names(devices)
    )
    on = Placement(names, len(names), local="vmap", executor="shard_map")

    def seconds(fn: Callable[[Any], Any], elements: int, dtype: Any) -> float:
        return _seconds(fn, elements, dtype, on, repeats)

    empty = seconds(lambda x: x + 1, 1, np.float32)
    flops = 2 * _CHAIN * matmul_size**3
    numbers = link_bytes // 4
    # A time that noise makes shorter than an empty step's counts as a nanosecond.
    peaks = [
        (dtype, flops / max(seconds(_products, matmul_size**2, dtype) - empty, 1e-9))
        for dtype in dtypes
    ]
    passed = max(seconds(lambda x: x + 1, numbers, np.float32) - empty, 1e-9)
    return Hardware(
        name="here",
        peak=tuple(peaks),
        memory_bytes=float(_memory_bytes(on)),
        memory_bandwidth=2 * 4 * numbers / passed,
        devices_per_node=on.num_devices,
        node=_link(on, empty, numbers, seconds),
        network=None,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        link_efficiency=1.0,
        step_overhead_s=empty,
        sources=((f"all, on {', '.join(names)}", "measured here"),),
    )


def _products(x: jax.Array) -> jax.Array:
    size = round(x.size**0.5)
    square = x.reshape(size, size)

    def as_in_training(_: Any, y: jax.Array) -> jax.Array:
        return (y @ square).T @ square @ square.T  # forward, and both gradients

    return lax.fori_loop(0, _CHAIN // 3, as_in_training, square)


def _link(
    on: Placement, empty: float, numbers: int, seconds: Callable[..., float]
) -> Link | None:
    """Of an all-reduce of one number and of many, by the formula of a ring."""
    others = on.num_devices - 1
    if not others:
        return None

    def reduce(x: jax.Array) -> jax.Array:
        return lax.psum(x, DEVICE_AXIS)

    short = seconds(reduce, 1, np.float32)
    long = seconds(reduce, numbers, np.float32)
    latency = max(short - empty, 0.0) / (2 * others)
    sent = 2 * others / on.num_devices * 4 * numbers
    return Link(bandwidth=sent / max(long - short, 1e-9), latency_s=latency)


def _seconds(
    fn: Callable[[Any], Any], elements: int, dtype: Any, on: Placement, repeats: int
) -> float:
    """The median time of a call in which each device works on its own elements."""
    rows = [Layout.PER_TOWER]
    on_all = over_devices(lambda x: fn(x[0])[None], on, rows, Layout.PER_TOWER)
    call = jit_on_devices(on_all, on, rows, Layout.PER_TOWER, donate=False)
    ones = np.full((on.num_devices, elements), 1e-3, np.float32)
    x = place(ones.astype(jnp.dtype(dtype)), on, Layout.PER_TOWER)
    jax.block_until_ready(call(x))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call(x))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _memory_bytes(on: Placement) -> int:
    """Of one device; CPU devices share the machine's."""
    stats = on.jax_devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // on.num_devices
