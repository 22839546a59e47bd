"""Steps of public supervised programs: `Program.make`."""
# ruff: noqa: PLC0415  # a program is imported when it is checked
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from benchmarks.foreign.adapt import Devices, Made, inner, normal
from towerjax.testing import copies, parts, placed


def images(size: int = 8) -> tuple[jax.Array, jax.Array]:
    """Eight images, which differ from row to row, and labels of ten."""
    bright = 1 + jnp.arange(8.0)[:, None, None, None]
    return normal(8, size, size, 3) * bright, jnp.arange(8) % 10


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


def flax_imagenet(devices: Devices) -> Made:
    """A step of a ResNet of one block, with BatchNorm."""
    import models
    import train
    from ml_collections import ConfigDict

    kind = functools.partial(
        models.ResNet, stage_sizes=[1], block_cls=models.ResNetBlock, num_filters=4
    )
    net = train.create_model(model_cls=kind, half_precision=False)
    config = ConfigDict({"half_precision": False, "momentum": 0.9})
    rate = lambda step: 0.1  # noqa: E731
    state = train.create_train_state(jax.random.key(0), config, net, 8, rate)
    step = functools.partial(train.train_step, learning_rate_fn=rate)
    batch = parts(dict(zip(("image", "label"), images(), strict=True)), devices)
    return jax.pmap(step, axis_name="batch"), (copies(state, devices), batch)


def flax_lm1b(devices: Devices) -> Made:
    """A step of a language model on rows of other lengths, by jit with shardings."""
    import models
    import train
    from flax.training.train_state import TrainState

    sizes = dict.fromkeys(("emb_dim", "qkv_dim", "mlp_dim", "max_len"), 16)
    config = models.TransformerConfig(
        16, 16, num_heads=2, num_layers=1, dropout_rate=0.1, **sizes
    )
    tokens = jax.random.randint(jax.random.key(0), (8, 16), 1, 16)
    tokens *= jnp.arange(16) < 2 * jnp.arange(1, 9)[:, None]
    net = models.TransformerLM(config)
    params = jax.jit(net.init)(jax.random.key(1), tokens)["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.1))
    step = jax.jit(train.train_step, static_argnums=(2, 3, 4))
    how = config, lambda step: 0.1, 0.0, jax.random.key(2)
    batch = placed({"inputs": tokens}, devices, "data")
    return lambda state, batch: step(state, batch, *how), (
        placed(state, devices),
        batch,
    )


def vit(devices: Devices, dropout: float = 0.0) -> Made:
    """A step of a vision transformer, with two micro-batches."""
    from ml_collections import ConfigDict
    from vit_jax import models_vit, train

    image, label = images()
    rates = {"dropout_rate": dropout, "attention_dropout_rate": 0.0}
    sizes = {"mlp_dim": 16, "num_heads": 2, "num_layers": 1}
    net = models_vit.VisionTransformer(
        num_classes=10,
        patches=ConfigDict({"size": (4, 4)}),
        transformer=sizes | rates,
        hidden_size=8,
        head_bias_init=0.1,
    )
    params = jax.jit(functools.partial(net.init, train=False))(jax.random.key(0), image)
    params = jax.tree.map(lambda x: x + 0.1 * normal(*x.shape), params["params"])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    update = train.make_update_fn(apply_fn=net.apply, accum_steps=2, tx=tx)
    batch = {"image": image, "label": jax.nn.one_hot(label, 10)}
    state = copies((params, tx.init(params)), devices)
    keys = copies(jax.random.PRNGKey(0), devices)
    return update, (*state, parts(batch, devices), keys)


def vit_dropout(devices: Devices) -> Made:
    """The same with dropout, of which each device draws its own."""
    return vit(devices, dropout=0.1)


def haiku_imagenet(devices: Devices) -> Made:
    """A step of a ResNet of four blocks, with BatchNorm."""
    import haiku as hk
    from absl import flags
    from examples.imagenet import train

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["train"])
    blocks = {"bottleneck": False, "channels_per_group": (8, 8, 8, 8)}
    hk.nets.ResNet50 = lambda classes, **how: hk.nets.ResNet(
        (1, 1, 1, 1), classes, **blocks, **how
    )
    batch = dict(zip(("images", "labels"), images(32), strict=True))
    state = jax.jit(train.initial_state)(jax.random.PRNGKey(0), batch)
    return train.train_step, (copies(state, devices), parts(batch, devices))


def scenic(devices: Devices, masked: int = 3) -> Made:
    """A step of a classifier of which padding rows are masked."""
    from ml_collections import ConfigDict
    from scenic.projects.baselines import fully_connected
    from scenic.train_lib import classification_trainer, train_utils

    image, label = images()
    config = ConfigDict({"hid_sizes": (8,), "model": {"hid_sizes": (8,)}})
    meta = {"num_classes": 10, "target_is_onehot": False}
    model = fully_connected.FullyConnectedClassificationModel(config, meta)
    net = model.flax_model
    sgd = optax.sgd(0.1)
    params = net.init(jax.random.key(0), image, train=False)["params"]
    state = train_utils.TrainState(
        tx=sgd,
        opt_state=sgd.init(params),
        params=params,
        global_step=jnp.array(0),
        rng=jax.random.PRNGKey(0),
    )
    step = functools.partial(
        classification_trainer.train_step,
        flax_model=net,
        loss_fn=model.loss_function,
        lr_fn=lambda step: 0.1 * step,
        metrics_fn=model.get_metrics_fn("train"),
        config=config,
    )
    mask = jnp.ones(8).at[8 - masked :].set(0)
    batch = {"inputs": image, "label": label, "batch_mask": mask}
    batch = parts(batch, devices)
    new_state = lambda state, batch: step(state, batch)[0]  # noqa: E731
    return jax.pmap(new_state, axis_name="batch"), (copies(state, devices), batch)


def multinerf(devices: Devices, heavy: float = 4.0) -> Made:
    """A step on rays of other weights, as of a Bayer mosaic."""
    import gin
    from internal import configs, models, train_utils, utils

    sizes = {"net_depth": 1, "net_width": 8, "bottleneck_width": 4, "max_deg_point": 2}
    samples = {"num_prop_samples": 4, "num_nerf_samples": 4}
    given = ("NerfMLP", sizes), ("PropMLP", sizes), ("Model", samples)
    for kind, values in given:
        gin.parse_config([f"{kind}.{name} = {x}" for name, x in values.items()])
    config = configs.Config(randomized=False)
    rays = utils.dummy_rays(include_exposure_values=True)
    model, params = models.construct_model(jax.random.PRNGKey(0), rays, config)
    state, _ = train_utils.create_optimizer(config, params)
    step = train_utils.create_train_step(model, config)
    weights = jnp.array([heavy, heavy, heavy, 1, 1, 1, 1, 1])
    rows = {
        "origins": normal(8, 3),
        "directions": normal(8, 3, seed=1),
        "viewdirs": normal(8, 3, seed=1),
        "radii": jnp.full((8, 1), 0.01),
        "lossmult": weights[:, None],
        "near": jnp.full((8, 1), 0.1),
        "far": jnp.full((8, 1), 5.0),
    }
    rays = jax.tree.map(lambda x: jnp.repeat(x, 8, 0), rays).replace(**rows)
    batch = utils.Batch(rays=rays, rgb=jax.nn.sigmoid(normal(8, 3, seed=2)))
    keys = copies(jax.random.PRNGKey(0), devices)

    def new_state(state: Any, batch: Any, keys: Any) -> Any:
        return step(keys, state, batch, None, 0.5, 1.0)[0]

    return new_state, (copies(state, devices), parts(batch, devices), keys)


def big_vision(devices: Devices, **config: Any) -> Made:
    """A step of a vision transformer by jit with shardings."""
    import big_vision.optax as bv_optax
    from big_vision import train
    from big_vision.models import vit
    from ml_collections import ConfigDict

    jax.config.update("jax_transfer_guard", "allow")  # which train.py disallows
    image, label = images()
    net = vit.Model(10, patch_size=(4, 4), width=8, depth=1, num_heads=2, mlp_dim=16)
    given: Any = ConfigDict(
        {"loss": "softmax_xent", "schedule": [(".*", {})], **config}
    )
    params = jax.jit(net.init)(jax.random.key(0), image)["params"]
    params = jax.tree.map(lambda x: x + 0.1 * normal(*x.shape), params)
    tx = optax.chain(optax.scale_by_schedule(lambda step: 1.0), optax.sgd(0.1))
    step = inner(
        train.main,
        "update_fn",
        bv_optax=bv_optax,
        config=given,
        devices_flat=devices,
        model=net,
        tx=tx,
    )
    state = {"params": params, "opt": tx.init(params)}
    state, key = placed((state, jax.random.PRNGKey(0)), devices)
    batch = {"image": image, "labels": jax.nn.one_hot(label, 10)}
    return jax.jit(step), (state, key, placed(batch, devices, "data"))


def big_vision_mixup(devices: Devices) -> Made:
    """The same with mixup, of the images of each device."""
    return big_vision(devices, mixup={"p": 0.2})


def algoperf(devices: Devices) -> Made:
    """A step of NAdamW on MNIST with weights of rows, by jit with shardings."""
    from algoperf.workloads.mnist.mnist_jax.workload import MnistWorkload
    from algorithms.baselines.external_tuning import jax_nadamw_full_budget as nadamw

    workload = MnistWorkload()
    tx = nadamw.nadamw(0.1)
    params, model_state = workload.init_model_fn(jax.random.key(0))
    rows = {"inputs": normal(8, 28, 28, 1), "targets": jnp.arange(8)}
    batch = placed(rows | {"weights": jnp.arange(8.0)}, devices, "data")
    state = placed((tx.init(params), params), devices)

    def step(opt_state: Any, params: Any, batch: Any) -> Any:
        how = jax.random.key(1), 1.0, 0.1, 0.0
        given = model_state, opt_state, params, batch
        return nadamw.train_step(workload, tx.update, *given, *how)

    return jax.jit(step), (*state, batch)


def kfac(devices: Devices) -> Made:
    """A step of K-FAC with adaptive damping."""
    import kfac_jax

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        out = jnp.tanh(x @ params["a"]) @ params["b"]
        kfac_jax.register_squared_error_loss(out, y)
        return ((out - y) ** 2).sum(1).mean()

    optimizer = kfac_jax.Optimizer(
        jax.value_and_grad(loss),
        l2_reg=1e-3,
        use_adaptive_damping=True,
        damping_adaptation_interval=1,
        initial_damping=1.0,
        inverse_update_period=1,
        num_burnin_steps=0,
        estimation_mode="ggn_exact",
        multi_device=True,
    )
    params = {"a": normal(3, 4), "b": normal(4, 2, seed=1)}
    rows = normal(8, 3, seed=2) * (1 + jnp.arange(8.0)[:, None]), normal(8, 2, seed=3)
    how = {"learning_rate": jnp.array(0.1), "momentum": jnp.array(0.9)}
    how["rng"] = jax.random.PRNGKey(0)
    params, how = copies((params, how), devices)
    rows = parts(rows, devices)
    state = optimizer.init(params, how["rng"], rows)

    def step(params: Any, state: Any, rows: Any, how: Any) -> Any:
        # It counts rows by that.
        with mock.patch("jax.device_count", lambda: len(devices)):
            return optimizer.step(params, state, batch=rows, global_step_int=0, **how)

    return step, (params, state, rows, how)
