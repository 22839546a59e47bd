"""A device that computes wrongly: its own copy of a flag says in which value.

A replicated array has a copy on each device. Here one device's copy of a flag is 1, and
the tower function changes the last bit of one element where its flag is 1. So the fault
stays with the device, whatever tower it runs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import towerjax as tj


def nudged(x, flag):
    """Change one element by one unit in the last place if the flag is not 0."""
    place = jnp.arange(x.size).reshape(x.shape) == x.size // 2
    return jnp.where(place, near(x, flag), x)


def near(x, flag):
    """Change each element by one unit in the last place if the flag is not 0."""
    return jnp.where(flag != 0, jnp.nextafter(x, jnp.full_like(x, jnp.inf)), x)


@jax.custom_vjp
def nudges_gradient(x, flag):
    """``x``, whose gradient is changed if the flag is not 0."""
    return x


nudges_gradient.defvjp(
    lambda x, flag: (x, flag), lambda flag, g: (nudged(g, flag), jnp.zeros_like(flag))
)


def on_one_device(x, device, value):
    """Return a replicated array with ``value`` on one device, and 0 on the others."""
    pieces = [
        jax.device_put(
            np.asarray(value if piece.device.id == device else 0 * value, x.dtype),
            piece.device,
        )
        for piece in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


# A kind of fault, and the part and leaf that it is found in.
KINDS = {
    "loss": ("loss", "loss/sum"),
    "weight": ("loss", "loss/weight"),
    "gradient": ("gradient", "params/w"),
    "gradient in bfloat16": ("gradient", "params/v"),
    "rows of a table": ("gradient", "params/table/values"),
    "metric": ("metric", "metrics/m/sum"),
    "sum": ("value", "total/value"),
    "rows": ("value", "rows/value"),
    "per tower": ("value", "own/values/value"),
    "replicated": ("value", "same"),
    "local": ("value", "local/seen/value"),
    "second pass": ("value", "squares/value"),
    "update of params": ("update", "params/w"),
    "update of the optimizer": ("update", "opt_state/w"),
    "update of extra": ("update", "extra/mean"),
}


def flag_of(params, kind):
    return jax.lax.stop_gradient(params["flags"])[[*KINDS].index(kind)]


def towers_loss(params, batch, tower):
    flag = functools.partial(flag_of, params)
    w = nudges_gradient(params["w"], flag("gradient"))
    v = nudges_gradient(params["v"], flag("gradient in bfloat16"))
    found = tj.sparse.take(params["table"], batch["ids"])
    found = nudges_gradient(found, flag("rows of a table"))
    hidden = jnp.tanh(batch["x"] @ w) * jax.random.bernoulli(tower.rng, 0.9, (1, 8))
    out = hidden @ v.astype(jnp.float32) + found.sum(-1) + tower.local["seen"] * 0
    return tj.Weighted.mean((out - batch["y"]) ** 2, tower.weight)


def first_pass(state, batch, tower):
    params = state.params
    flag = functools.partial(flag_of, params)
    loss, grads = tj.value_and_grad(towers_loss)(params, batch, tower)
    loss = tj.Weighted(
        nudged(loss.sum, flag("loss")), nudged(loss.weight, flag("weight"))
    )
    rows = jnp.sin(batch["x"] @ params["w"])
    weight = tower.weight
    norm = (params["w"] ** 2).sum()
    seen = jax.tree.map(
        lambda x: nudged(x + batch["y"].sum(), flag("local")), state.local
    )
    return {
        "loss": loss,
        "grads": grads,
        "metrics": {
            "m": tj.Weighted(
                nudged((rows.sum(1) * weight).sum(), flag("metric")), weight.sum()
            )
        },
        "total": tj.Sum(nudged(rows.sum(), flag("sum"))),
        "rows": tj.Rows(nudged(rows * weight[:, None], flag("rows"))),
        "own": tj.PerTower(tj.Sum(nudged(rows.sum(), flag("per tower")))),
        "same": nudged(norm, flag("replicated")),
        "local": seen,
    }


def second_pass(state, batch, tower, merged):
    others = merged["rows"].value.sum(1) + merged["total"].value
    squares = (batch["y"][:, None] - others[None]) ** 2 * tower.weight[:, None]
    value = nudged(squares.sum(), flag_of(state.params, "second pass"))
    return {**merged, "squares": tj.Sum(value)}


def update(state, merged):
    flag = functools.partial(flag_of, state.params)

    def last_row(x, kind):
        """Change the last row: if the array is sharded, an element of each shard."""
        return jnp.concatenate([x[:-1], near(x[-1:], flag(kind))])

    grads = merged["grads"].value
    speed = 0.9 * state.opt_state["w"] + grads["w"]
    after = state.params["w"] - 0.1 * speed
    mean = 0.9 * state.extra["mean"] + merged["squares"].value
    after = dataclasses.replace(
        state,
        params={**state.params, "w": last_row(after, "update of params")},
        opt_state={"w": last_row(speed, "update of the optimizer")},
        local=merged["local"],
        extra={"mean": nudged(mean, flag("update of extra"))},
    )
    return after, {"loss": merged["loss"], "m": merged["metrics"]["m"]}


def first_params():
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(5, 8)).astype(np.float32),
        "v": jnp.asarray(rng.normal(size=8), jnp.bfloat16),
        "table": rng.normal(size=(40, 3)).astype(np.float32),
        "flags": np.zeros(len(KINDS), np.float32),
    }


def batch_of(rows=24):
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(rows, 5)).astype(np.float32),
        "ids": rng.integers(0, 40, size=rows),
        "y": rng.normal(size=rows).astype(np.float32),
    }


def begun(strategy, **options):
    """A step with leaves of every kind, and its first state."""
    step = tj.build_step((first_pass, second_pass), update, strategy, **options)
    params = first_params()
    state = step.init(
        params,
        opt_state={"w": np.zeros_like(params["w"])},
        local={"seen": tj.TowerLocal(np.float32(1), tj.Reduction.SUM)},
        extra={"mean": np.float32(0)},
    )
    return step, state


def with_fault(state, device, kind):
    """Return the state with a fault of one kind on one device."""
    flags = np.zeros(len(KINDS), np.float32)
    flags[[*KINDS].index(kind)] = 1
    planted = on_one_device(state.params["flags"], device, flags)
    return state.replace(params={**state.params, "flags": planted})
