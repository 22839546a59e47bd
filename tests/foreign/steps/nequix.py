"""A step of nequix: potentials of atoms."""
# ruff: noqa: PLC0415  # a program is imported when it is checked

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.foreign.adapt import Devices, Made, normal
from towerjax.testing import copies, inner


def nequix(devices: Devices, atoms: int | None = None) -> Made:
    """A step on graphs of two to nine atoms."""
    import equinox as eqx
    import jraph
    from nequix import model, train

    def graph(atoms: int) -> Any:
        ring = jnp.arange(atoms)
        return jraph.GraphsTuple(
            n_node=jnp.array([atoms]),
            n_edge=jnp.array([2 * atoms]),
            nodes={
                "species": ring % 2,
                "positions": 2 * normal(atoms, 3, seed=atoms),
                "forces": normal(atoms, 3, seed=atoms + 50),
            },
            edges={"shifts": jnp.zeros((2 * atoms, 3))},
            senders=jnp.concatenate([ring, (ring + 1) % atoms]),
            receivers=jnp.concatenate([(ring + 1) % atoms, ring]),
            globals={
                "cell": 10 * jnp.eye(3)[None],
                "energy": normal(1, seed=atoms),
                "stress": normal(1, 3, 3, seed=atoms),
            },
        )

    def batch(graphs: Any) -> Any:  # one graph more, and atoms, pad
        return jraph.pad_with_graphs(jraph.batch(graphs), 48, 96, len(graphs) + 1)

    graphs = [graph(atoms or 2 + i) for i in range(8)]
    each = 8 // len(devices)
    rows = [batch(graphs[i : i + each]) for i in range(0, 8, each)]
    sgd = optax.sgd(0.1)
    names = ("energy_weight", "force_weight", "stress_weight", "loss_type", "ema_decay")
    config = dict(zip(names, (1.0, 1.0, 0.0, "mse", 0.9), strict=True))
    step = inner(train.train, "train_step", config=config, optim=sgd)
    net = model.Nequix(
        jax.random.key(0),
        2,
        lmax=1,
        hidden_irreps="4x0e + 4x1o",
        n_layers=2,
        radial_mlp_size=8,
    )
    opt_state = sgd.init(eqx.filter(net, eqx.is_array))
    arrays, fixed = eqx.partition(net, eqx.is_array)

    def of_arrays(arrays: Any, opt_state: Any, rows: Any) -> Any:
        net = eqx.combine(arrays, fixed)
        new = step(net, net, jnp.array(0), opt_state, rows)
        return eqx.filter(new[0], eqx.is_array), new[2]

    rows = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    state = copies((arrays, opt_state), devices)
    return jax.pmap(of_arrays, axis_name="device"), (*state, rows)
