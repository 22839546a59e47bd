"""Train a GAN to draw digits: two networks, two optimizers, one model function.

The data are scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, on 8 towers. The
losses are the non-saturating ones of Goodfellow et al. (2014), with the penalty of
Mescheder et al. (2018) on the discriminator's gradient at real images: without it the
generator ends up drawing one image. Each tower draws its own noise from ``tower.rng``.

Two numbers show that it learned, both measured on 1,000 drawn images: the Frechet
distance to the test split in the space of the 16 largest principal components of the
training split, and how often a classifier of real digits reads each class.

    python examples/gan.py
    python examples/gan.py --towers 8 --devices 2 --steps 600
"""

import argparse
import dataclasses
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

import towerjax as tj

BATCH_SIZE = 128
TRAIN_ROWS = 1440
NOISE = 16  # numbers from which an image is generated
PENALTY = 0.5
STEPS = 3000
DRAWN = 1000
FARTHEST = 0.6  # the distance of a run that learned; about 4 before the first step
RAREST = 0.03  # the share of the class drawn least often; 0.1 would be even
PICTURE = pathlib.Path("runs/gan/samples.png")


class Generator(nn.Module):
    """Noise ``[b, NOISE]`` -> images ``[b, 8, 8, 1]`` from 0 to 1."""

    @nn.compact
    def __call__(self, noise: jax.Array) -> jax.Array:
        """Return the images."""
        x = nn.relu(nn.Dense(128)(noise))
        for _ in range(2):
            x = nn.relu(nn.LayerNorm()(nn.Dense(128)(x)))
        return nn.sigmoid(nn.Dense(64)(x)).reshape((-1, 8, 8, 1))


class Discriminator(nn.Module):
    """Images ``[b, 8, 8, 1]`` -> ``[b]`` logits, above 0 where one looks real."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Return the logits."""
        x = 2 * image.reshape((image.shape[0], -1)) - 1
        for _ in range(2):
            x = nn.leaky_relu(nn.Dense(128)(x), 0.2)
        return nn.Dense(1)(x)[:, 0]


generator = Generator()
discriminator = Discriminator()


def images_of(net: Any, noise: Any) -> Any:
    return generator.apply(net, noise)


def logits_of(net: Any, image: Any) -> Any:
    return discriminator.apply(net, image)


def optimizers(steps: int) -> dict[str, tj.estimator.TowerOptimizer]:
    """One for each network, with its own gradients and moments."""
    rate = optax.cosine_decay_schedule(2e-3, steps)
    adam = optax.adam(rate, b1=0.5, b2=0.99)
    return {
        name: tj.estimator.TowerOptimizer(adam)
        for name in ("generator", "discriminator")
    }


def init_variables(steps: int, seed: int) -> tj.TrainState:
    optimizer_of = optimizers(steps)
    keys = jax.random.split(jax.random.key(seed), 3)
    image = jnp.zeros((1, 8, 8, 1))
    params = {
        "generator": jax.jit(generator.init)(keys[0], jnp.zeros((1, NOISE))),
        "discriminator": jax.jit(discriminator.init)(keys[1], image),
    }
    opt_state = {name: optimizer_of[name].init(params[name]) for name in params}
    return tj.TrainState(
        step=jnp.int32(0), params=params, opt_state=opt_state, local={}, rng=keys[2]
    )


def generator_losses(params: Any, judge: Any, noise: jax.Array) -> jax.Array:
    """``[b]``: the generator's loss, high where drawn images do not look real."""
    return nn.softplus(-logits_of(judge, images_of(params, noise)))


def discriminator_losses(params: Any, image: jax.Array, drawn: jax.Array) -> jax.Array:
    """``[b]``: the discriminator's loss on real and drawn images, and the penalty."""

    def logit(one: jax.Array) -> jax.Array:
        return logits_of(params, one[None])[0]

    slopes = jax.vmap(jax.grad(logit))(image)
    penalty = PENALTY / 2 * jnp.square(slopes).sum((1, 2, 3))
    of_real = nn.softplus(-logits_of(params, image))
    return of_real + nn.softplus(logits_of(params, drawn)) + penalty


def model_fn(
    variables: Any,
    features: Any,
    labels: Any,
    mode: tj.estimator.Mode,
    params: Any,
    tower: Any,
) -> tj.estimator.ModelSpec:
    """Train on images; in ``Mode.PREDICT`` features are noise to draw images from."""
    nets = variables.params
    if mode is tj.estimator.Mode.PREDICT:
        drawn = images_of(nets["generator"], features)
        return tj.estimator.ModelSpec(mode, predictions={"image": drawn})

    noise = jax.random.normal(tower.rng, (2, features.shape[0], NOISE))
    drawn = images_of(nets["generator"], noise[0])
    # Both losses see the networks as they came in, so their order does not matter.
    losses_of = {
        "generator": lambda net: generator_losses(net, nets["discriminator"], noise[1]),
        "discriminator": lambda net: discriminator_losses(net, features, drawn),
    }
    losses = {}
    after = {}
    for name, optimizer in optimizers(params["steps"]).items():
        own = dataclasses.replace(
            variables, params=nets[name], opt_state=variables.opt_state[name]
        )
        losses[name], after[name] = optimizer.minimize(
            lambda net, of=losses_of[name]: tj.Weighted.mean(of(net), tower.weight), own
        )
    train_op = dataclasses.replace(
        variables,
        params={name: own.params for name, own in after.items()},
        opt_state={name: own.opt_state for name, own in after.items()},
    )
    return tj.estimator.ModelSpec(
        mode,
        loss=losses["generator"],
        train_op=train_op,
        eval_metrics={"discriminator": losses["discriminator"]},
    )


def load_splits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    image, label = load_digits(return_X_y=True)
    image = (image / 16).astype(np.float32).reshape((-1, 8, 8, 1))
    order = np.random.default_rng(0).permutation(len(label))
    shuffled = {"image": image[order], "label": label[order].astype(np.int32)}
    train_split = {name: rows[:TRAIN_ROWS] for name, rows in shuffled.items()}
    test_split = {name: rows[TRAIN_ROWS:] for name, rows in shuffled.items()}
    return train_split, test_split


def frechet_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Between the normal distributions of two sets of features, ``[n, k]`` each.

    Heusel et al. (2017): with means ``m`` and covariances ``C`` it is
    ``|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))``.
    """
    means = one.mean(axis=0) - other.mean(axis=0)
    first = np.cov(one.T)
    second = np.cov(other.T)
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    values = np.linalg.eigvalsh(root @ second @ root)
    cross = np.sqrt(np.maximum(values, 0)).sum()
    return float(means @ means + np.trace(first) + np.trace(second) - 2 * cross)


class Critic:
    """The measures of drawn images, fitted to real ones once."""

    def __init__(self, train_split: Any, test_split: Any) -> None:
        """Fit to the training split; keep the test split's features."""
        rows = train_split["image"].reshape((-1, 64))
        self.components = PCA(16, random_state=0).fit(rows)
        self.reader = LogisticRegression(solver="newton-cg")
        self.reader.fit(rows, train_split["label"])
        self.test = self.components.transform(test_split["image"].reshape((-1, 64)))

    def measure(self, image: np.ndarray) -> tuple[float, np.ndarray]:
        """``(distance, [10] shares of the classes)``."""
        rows = image.reshape((-1, 64))
        distance = frechet_distance(self.components.transform(rows), self.test)
        counts = np.bincount(self.reader.predict(rows), minlength=10)
        return distance, counts / len(rows)


def draw(columns: dict[str, np.ndarray], path: pathlib.Path) -> None:
    figure = Figure(figsize=(2.4 * len(columns), 3.6), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(columns)), columns, strict=True):
        cells = columns[title][:48].reshape((8, 6, 8, 8))
        cells = np.pad(cells, ((0, 0), (0, 0), (1, 1), (1, 1)))
        grid = cells.transpose((0, 2, 1, 3)).reshape((80, 60))
        axes.imshow(grid, cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(title, fontsize=9)
        axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def choose_strategy(towers: int, num_devices: int | None) -> tj.Mirrored:
    jax.config.update("jax_num_cpu_devices", num_devices or towers)
    if num_devices is None:
        return tj.Mirrored(towers=towers)
    platform = jax.default_backend()
    devices = tuple(f"{platform}:{i}" for i in range(num_devices))
    return tj.Mirrored(towers=towers, devices=devices)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--towers", type=int, default=8, help="a divisor of 128")
    parser.add_argument("--devices", type=int, help="how many the towers share")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    strategy = choose_strategy(args.towers, args.devices)
    train_split, test_split = load_splits()
    critic = Critic(train_split, test_split)
    columns = {}
    hyperparameters = {"steps": args.steps}
    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy, donate=True)
    variables = model.init(init_variables(args.steps, args.seed))
    noise = np.random.default_rng(1).normal(size=(DRAWN, NOISE)).astype(np.float32)

    stops = {round(i * args.steps / 6) for i in range(7)}
    data = tj.batches(
        train_split, BATCH_SIZE, epochs=None, seed=args.seed, drop_remainder=True
    )
    for number in range(args.steps + 1):
        if number in stops:
            spec = model(
                variables, noise, mode=tj.estimator.Mode.PREDICT, params=hyperparameters
            )
            image = jax.device_get(spec.predictions)["image"]
            distance, shares = critic.measure(image)
            columns[f"step {number}\ndistance {distance:.2f}"] = image
            print(
                f"after step {number:4}  distance {distance:.4f}"
                f"  rarest class {shares.min():.3f}"
            )
        if number < args.steps:
            image = next(data)["image"]
            variables = model(variables, image, params=hyperparameters).train_op
    titles = list(columns)
    shown = {title: columns[title] for title in (titles[0], titles[1], titles[-1])}
    draw({**shown, "real": test_split["image"]}, PICTURE)
    print(f"samples in {PICTURE}")
    if args.steps >= STEPS and (distance > FARTHEST or shares.min() < RAREST):
        raise SystemExit(
            f"{args.steps} steps should reach a distance of at most {FARTHEST} and draw"
            f" each class in {RAREST} of the images, but reached {distance:.4f} and"
            f" {shares.min():.3f}."
        )


if __name__ == "__main__":
    main()
