"""Right losses that stay unproved, each with a form of the same meaning that is proved.

The table of docs/proof.md says what the note of the first form is, and what to write.
"""

import jax
import jax.numpy as jnp
import optax

import towerjax as tj

SHAPES = {"x": (16, 6, 3), "mask": (16, 6), "y": (16,), "rare": (16,)}
BATCH = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in SHAPES.items()} | {
    "edges": jax.ShapeDtypeStruct((16, 4), jnp.int32),
    "length": jax.ShapeDtypeStruct((16,), jnp.int32),
    "number": jax.ShapeDtypeStruct((16,), jnp.int32),
}
PARAMS = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}


def costly(params, batch):
    return batch["rare"] * jnp.tanh(batch["x"][:, 0] @ params["w"])


def nothing(params, batch):
    return jnp.zeros(len(batch["x"]))


def trips(length):
    def add(carry):
        at, total = carry
        return at + 1, total + (at < length) / (at + 1)

    start = 0, jnp.zeros(length.shape)
    return jax.lax.while_loop(lambda carry: (carry[0] < length).any(), add, start)[1]


def guard_before(params, batch, tower):
    losses = (batch["x"] @ params["w"]) ** 2 * batch["mask"]
    return tj.Weighted(losses.sum(), jnp.maximum(batch["mask"].sum(), 1))


def guard_after(params, batch, tower):
    losses = (batch["x"] @ params["w"]) ** 2
    return tj.Weighted.mean(losses, batch["mask"] * tower.weight[:, None])


def shift_before(params, batch, tower):
    scores = batch["x"] @ params["w"]
    top = scores.max()
    losses = jnp.log(jnp.exp(scores - top).sum(axis=1)) + top
    return tj.Weighted.mean(losses, tower.weight)


def shift_after(params, batch, tower):
    scores = batch["x"] @ params["w"]
    top = scores.max(axis=1)
    losses = jnp.log(jnp.exp(scores - top[:, None]).sum(axis=1)) + top
    return tj.Weighted.mean(losses, tower.weight)


def skip_before(params, batch, tower):
    is_needed = batch["rare"].any()
    losses = jax.lax.cond(is_needed, costly, nothing, params, batch)
    return tj.Weighted.mean(losses, tower.weight)


def skip_after(params, batch, tower):
    is_needed = tower.reduce(tj.Reduction.SUM, batch["rare"].sum()) > 0
    losses = jax.lax.cond(is_needed, costly, nothing, params, batch)
    return tj.Weighted.mean(losses, tower.weight)


def loop_before(params, batch, tower):
    losses = []
    for x in batch["x"]:
        losses.append(jnp.tanh(x[0] @ params["w"]))
    return tj.Weighted.mean(jnp.stack(losses), tower.weight)


def loop_after(params, batch, tower):
    losses = jax.vmap(lambda x: jnp.tanh(x[0] @ params["w"]))(batch["x"])
    return tj.Weighted.mean(losses, tower.weight)


def graph_before(params, batch, tower):
    nodes = batch["x"].reshape(-1, 3)  # of all graphs, 6 each
    edges = batch["edges"] + 6 * jnp.arange(len(batch["x"]))[:, None]
    return tj.Weighted.mean(nodes[edges].sum(axis=1) @ params["w"], tower.weight)


def graph_after(params, batch, tower):
    sums = jax.vmap(lambda nodes, edges: nodes[edges].sum(axis=0))
    losses = sums(batch["x"], batch["edges"]) @ params["w"]
    return tj.Weighted.mean(losses, tower.weight)


def end_before(params, batch, tower):
    return {"loss": tj.Weighted.mean(trips(batch["length"]), tower.weight)}


def end_after(params, batch, tower):
    return {"loss": tj.Weighted.mean(jax.vmap(trips)(batch["length"]), tower.weight)}


def group_before(params, batch, tower):
    groups = batch["x"][:, 0].reshape(-1, 2, 3)
    losses = jax.lax.map(lambda rows: jnp.tanh(rows @ params["w"]), groups)
    return tj.Weighted.mean(losses.reshape(-1), tower.weight)


def group_after(params, batch, tower):
    losses = jax.lax.map(lambda row: jnp.tanh(row @ params["w"]), batch["x"][:, 0])
    return tj.Weighted.mean(losses, tower.weight)


def number_before(params, batch, tower):
    number = tower.id * len(batch["y"]) + jnp.arange(len(batch["y"]))
    losses = jnp.cos(number) * (batch["y"] - params["w"][0]) ** 2
    return tj.Weighted.mean(losses, tower.weight)


def number_after(params, batch, tower):
    losses = jnp.cos(batch["number"]) * (batch["y"] - params["w"][0]) ** 2
    return tj.Weighted.mean(losses, tower.weight)


PAIRS = {
    "guard": (guard_before, guard_after),
    "shift": (shift_before, shift_after),
    "skip": (skip_before, skip_after),
    "loop": (loop_before, loop_after),
    "graph": (graph_before, graph_after),
    "group": (group_before, group_after),
    "number": (number_before, number_after),
}
METRICS = {"end": (end_before, end_after)}  # of an evaluation
PADDED = {"group", "number"}  # proved for full batches in both forms


def reason(name, fn):
    """Why a step of four towers with this loss is not proved; None if it is."""
    strategy = tj.Mirrored(towers=4)
    if name in METRICS:
        step = tj.build_eval_step(fn, strategy)
        return step.check(PARAMS, BATCH).unproved.get("metrics['loss']")
    how = {"remainder": "pad" if name in PADDED else "error"}
    step = tj.build_train_step(fn, optax.sgd(0.1), strategy, **how)
    return step.check(PARAMS, BATCH).unproved.get("loss")
