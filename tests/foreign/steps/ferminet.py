"""A step of FermiNet: quantum Monte Carlo."""
# ruff: noqa: PLC0415  # a program is imported when it is checked

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.foreign.adapt import Devices, Made, normal
from towerjax.testing import copies, parts


def ferminet(devices: Devices) -> Made:
    """A step on the energy of helium, clipped about the median of all devices."""
    from ferminet import constants, hamiltonian, loss, networks, train

    charges = jnp.array([2.0])
    spins = (1, 1)
    net = networks.make_fermi_net(spins, charges, determinants=1, hidden_dims=((8, 4),))
    energy = hamiltonian.local_energy(net.apply, charges, spins)
    log_net = lambda *args: net.apply(*args)[1]  # noqa: E731
    evaluate = loss.make_loss(log_net, energy, clip_local_energy=1.0)
    sgd = optax.sgd(0.1)
    update = train.make_opt_update_step(evaluate, sgd)
    data = networks.FermiNetData(
        positions=normal(8, 6),
        spins=jnp.tile(jnp.array([1.0, -1.0]), (8, 1)),
        atoms=jnp.zeros((8, 1, 3)),
        charges=jnp.tile(charges, (8, 1)),
    )

    def step(params: Any, opt_state: Any, data: Any) -> Any:
        return update(params, data, opt_state, jax.random.PRNGKey(0))[:3]

    params = net.init(jax.random.PRNGKey(0))
    state = copies((params, sgd.init(params)), devices)
    return constants.pmap(step), (*state, parts(data, devices))
