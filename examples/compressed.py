"""Sum gradients in 8 or 4 bits per number, with and without feedback of the error.

Each device encodes its towers' sum, in blocks with one scale each, and sends each
device a share (an all-to-all: Wang et al., 2023, https://arxiv.org/abs/2306.10209). It
adds the shares that it receives, encodes the sum again and sends it to all devices (an
all-gather). With feedback it adds what both codes lose to its next gradient
(Karimireddy et al., 2019, https://arxiv.org/abs/1901.09847), so that nothing is lost in
the sum over all steps.

The output is the bytes that a device sends per step, and the final loss: for an exact
sum, for 4 bits, and for 4 bits without feedback.

    python examples/compressed.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import towerjax as tj

BLOCK = 256
AXIS = "devices"
ratio = tj.metrics.ratio


def encode(x, bits):
    """``[..., n]`` float32 as ``[..., bytes]``: whole numbers, then a scale a block."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    most = 2 ** (bits - 1) - 1
    scales = abs(blocks).max(axis=-1) / most
    units = jnp.where(scales == 0, 1, scales)[..., None]
    codes = jnp.round(blocks / units).astype(jnp.int8).reshape(x.shape)
    if bits == 4:  # two share a byte
        pairs = (codes + 8).astype(jnp.uint8).reshape(*x.shape[:-1], -1, 2)
        codes = pairs[..., 0] | (pairs[..., 1] << 4)
    return jnp.concatenate([codes.view(jnp.uint8), scales.view(jnp.uint8)], axis=-1)


def decode(data, bits, numbers):
    """Return the inverse of `encode`, up to half a scale."""
    cut = numbers * bits // 8
    shape = (*data.shape[:-1], -1, BLOCK)
    codes = data[..., :cut]
    scales = data[..., cut:].view(jnp.float32)
    if bits == 4:
        whole = jnp.stack([codes & 15, codes >> 4], axis=-1).astype(jnp.int8) - 8
    else:
        whole = codes.view(jnp.int8)
    return (whole.reshape(shape) * scales[..., None]).reshape(*data.shape[:-1], -1)


def sum_encoded(x, bits, devices):
    """Return the sum of all ``x``, what a device lost, and the relative error."""
    rows = jnp.pad(x, (0, -x.size % (BLOCK * devices))).reshape(devices, -1)
    size = rows.shape[1]
    row = lax.axis_index(AXIS)
    sent = encode(rows, bits)
    lost = rows - decode(sent, bits, size)
    got = lax.all_to_all(sent, AXIS, split_axis=0, concat_axis=0, tiled=True)
    share = decode(got, bits, size).sum(axis=0)
    sent = encode(share, bits)
    lost_of_share = share - decode(sent, bits, size)
    total = decode(lax.all_gather(sent, AXIS), bits, size).reshape(-1)[: x.size]
    # A bound, of the two kinds of losses; never less than the truth.
    each = jnp.sqrt((lost**2).sum()), (lost_of_share**2).sum()
    each, shares = lax.psum(each, AXIS)
    error = ratio(each + jnp.sqrt(shares), jnp.linalg.norm(total))
    lost = lost.at[row].add(lost_of_share)  # sent with its next gradient
    return total, lost.reshape(-1)[: x.size], error


def compressed(bits, feedback=True):
    """For ``build_train_step(..., extend=)``: one whose gradient is sent so."""

    def extend(fns):
        devices = len(fns.strategy.worker_devices)

        def tower_fn(state, rows, tower):
            out = fns.tower(state, rows, tower)
            grads = out.pop("grads")  # a Weighted
            own = tj.PerTower(tj.Sum(ravel_pytree(grads.sum)[0]))  # which nothing sends
            return {**out, "weight": tj.Sum(grads.weight), "own": own}

        def on_device(rows, lost, weight):
            # Of a mean, as the next batch may have another weight. The rows of a
            # device's towers add up to what it lost.
            x = ratio(rows.sum(axis=0), weight) + lost.sum(axis=0)
            total, own, error = sum_encoded(x, bits, devices)
            kept = jnp.zeros_like(lost).at[0].set(own if feedback else 0)
            return total * weight, kept, error

        def update_fn(state, merged):
            weight = merged.pop("weight").value
            rows = merged.pop("own").values.value
            total, lost, error = jax.shard_map(
                on_device,
                mesh=AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,)),
                in_specs=(P(AXIS), P(AXIS), P()),
                out_specs=(P(), P(AXIS), P()),
                check_vma=False,
            )(rows, state.local["lost"].value, weight)
            lost = dataclasses.replace(state.local["lost"], value=lost)
            grads = ravel_pytree(state.params)[1](total)
            merged["grads"] = tj.Weighted(grads, weight)
            state, metrics = fns.update(state, merged)
            fine = jnp.isfinite(total).all()  # else the step is refused
            loss = metrics["loss"]
            loss = jax.tree.map(lambda x: jnp.where(fine, x, jnp.nan), loss)
            metrics |= {"loss": loss, "compression/error": error}
            state = dataclasses.replace(state, local={"lost": lost})
            return state, metrics

        def init_fn(params):
            zeros = jnp.zeros_like(ravel_pytree(params)[0])
            lost = tj.TowerLocal(zeros, tj.Reduction.SUM, name="lost")
            return fns.init(params) | {"local": {"lost": lost}}

        return fns._replace(tower=tower_fn, update=update_fn, init=init_fn)

    return extend


def loss_fn(params, batch, tower):
    """Large gradients that cancel, and hide small ones."""
    sign = 1 - 2 * (tower.id % 2)
    losses = 0.5 * ((params - batch) ** 2).mean(axis=-1) + 0.1 * sign * params[0]
    return tj.Weighted.mean(losses, tower.weight)


def main():
    """Train with each kind of sum."""
    jax.config.update("jax_num_cpu_devices", 4)
    batch = np.ones((8, 512), np.float32)
    for name, extend in {
        "exact": None,
        "4 bits": compressed(4),
        "no feedback": compressed(4, feedback=False),
    }.items():
        strategy = tj.Mirrored(towers=4)
        # The loss is another for each tower, which no audit accepts.
        how = {"extend": extend, "audit": False}
        step = tj.build_train_step(loss_fn, optax.sgd(10.0), strategy, **how)
        state = step.init(np.zeros(512, np.float32))
        sent = step.report(state, batch).bytes_sent
        state, history = tj.run(step, state, [batch] * 200, progress=False)
        print(f"{sent:4} bytes, loss {history.metrics['loss'][-1]:.3f}, {name}")
    error = history.metrics["compression/error"][0]
    print(f"error at most {error:.2f} in the first step")


if __name__ == "__main__":
    main()
