"""Compare what programs hold and send on absent devices with hand-written ones.

Each program is compiled three times for the same devices: as towerjax makes it; as
``jit(shard_map(...))`` with ``pmean(gradients)``; and like the latter, but with the
promise of ``guard="gradients"`` written by hand: if a loss or a gradient is not finite,
the step changes nothing. The table shows what the compiler made of them side by side.
Nothing runs.

Run: ``python -m benchmarks.absent [--programs mlp cnn] [--on h200] [--devices 1 8]``.
It needs ``pip install -e '.[gpu-compiler]'``.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

import towerjax as tj
from benchmarks.harness import begin, options_of, parser_of
from benchmarks.steps import keep_if_not_finite
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.mesh.absent import Absent
from towerjax.mesh.placement import Placement
from towerjax.tools import StepReport
from towerjax.types import Layout, PyTree
from towerjax.types.tables import in_bytes

BF16 = jnp.bfloat16


class _Block(nn.Module):
    """A transformer block of GPT-2."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        y = nn.LayerNorm(dtype=BF16)(x)
        x = x + nn.MultiHeadAttention(self.heads, dtype=BF16)(y, mask=mask)
        y = nn.Dense(4 * self.width, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x))
        return x + nn.Dense(self.width, dtype=BF16)(nn.gelu(y))


class GPT(nn.Module):
    """GPT-2-small, of which each block is computed again in the backward pass."""

    words: int = 50304
    width: int = 768
    layers: int = 12

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of each next word."""
        embed = nn.Embed(self.words, self.width, dtype=BF16)
        shape = (tokens.shape[1], self.width)
        place = self.param("place", nn.initializers.normal(0.02), shape)
        x = embed(tokens) + place.astype(BF16)[None]
        for _ in range(self.layers):
            x = nn.remat(_Block)(self.width, self.width // 64)(x)
        return embed.attend(nn.LayerNorm(dtype=BF16)(x)).astype(jnp.float32)


class _Bottleneck(nn.Module):
    """A block of ResNet-50, normalised over each tower's own rows."""

    width: int
    stride: int
    axis_name: str | None = None
    dtype: Any = BF16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(_norm, axis_name=self.axis_name, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.width, (3, 3), strides)(y)))
        y = norm()(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, (1, 1), strides)(x))
        return nn.relu(x + y)


def _norm(**options: Any) -> Any:
    return nn.BatchNorm(use_running_average=False, **options)


class ResNet50(nn.Module):
    """ResNet-50, whose running statistics are not kept.

    Attributes:
      axis_name: The axis over whose rows a batch is normalised; None is a tower's own.
      dtype: In which it computes.
    """

    axis_name: str | None = None
    dtype: Any = BF16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of images, ``[b, 1000]``."""
        how: Any = {"axis_name": self.axis_name, "dtype": self.dtype}
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.max_pool(nn.relu(_norm(**how)(x)), (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = _Bottleneck(64 * 2**stage, stride, **how)(x)
        return nn.Dense(1000)(x.mean((1, 2)).astype(jnp.float32))


class _CNN(nn.Module):
    """Two convolutions and two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 64):
            x = nn.avg_pool(nn.relu(nn.Conv(width, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(256)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


class _MLP(nn.Module):
    """Four dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.relu(nn.Dense(1024)(x))
        return nn.Dense(10)(x)


@dataclasses.dataclass(frozen=True)
class Program:
    """A model and its batch, in shapes.

    Attributes:
      net: Gives logits.
      rows: Of each device.
      example: Shape and dtype of one input.
      labels: Shape of one example's labels.
      optimizer: An optax transformation.
    """

    net: nn.Module
    rows: int
    example: tuple[tuple[int, ...], Any]
    labels: tuple[int, ...] = ()
    optimizer: optax.GradientTransformation = optax.adam(1e-3)

    def params(self) -> PyTree:
        """Return the shapes of the parameters."""
        shape, dtype = self.example
        one = jnp.zeros((1, *shape), dtype)
        return jax.eval_shape(lambda: self.net.init(jax.random.key(0), one))["params"]

    def batch(self, devices: int) -> PyTree:
        """Return the shapes of the global batch for this number of devices."""
        shape, dtype = self.example
        rows = self.rows * devices
        return {
            "x": jax.ShapeDtypeStruct((rows, *shape), dtype),
            "y": jax.ShapeDtypeStruct((rows, *self.labels), jnp.int32),
        }

    def losses(self, params: PyTree, batch: PyTree) -> jax.Array:
        """Return the loss of each example, ``[b]``."""
        variables = {"params": params}
        kept = ["batch_stats"]
        logits, _ = self.net.apply(variables, batch["x"], mutable=kept)
        of = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return of.reshape(of.shape[0], -1).mean(-1)

    def make_step(self, strategy: tj.Mirrored) -> tuple[Any, PyTree, PyTree]:
        """Return towerjax's step, and the shapes of its arguments."""

        def loss_fn(params: PyTree, batch: PyTree, tower: tj.Tower) -> tj.Weighted:
            return tj.Weighted.mean(self.losses(params, batch), tower.weight)

        step = tj.build_train_step(loss_fn, self.optimizer, strategy)
        return step, self.params(), self.batch(strategy.num_towers)


GPT2 = Program(
    GPT(),
    8,
    ((1024,), jnp.int32),
    labels=(1024,),
    optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4)),
)
PROGRAMS = {
    "mlp": Program(_MLP(), 256, ((784,), jnp.float32)),
    "cnn": Program(_CNN(), 128, ((32, 32, 3), jnp.float32)),
    "resnet50": Program(
        ResNet50(), 64, ((224, 224, 3), BF16), optimizer=optax.sgd(0.1, 0.9)
    ),
    "gpt2": GPT2,
}


def by_towerjax(program: Program, strategy: tj.Mirrored) -> StepReport:
    """Report on the step that `tj.build_train_step` makes."""
    step, params, batch = program.make_step(strategy)
    return step.report(params, batch)


def hand_written(program: Program, placement: Placement, guarded: bool = False) -> Any:
    """Return a step of ``shard_map`` with ``pmean(gradients)``, as people write it.

    A guarded step changes nothing if a loss or a gradient is not finite.
    """
    optimizer = program.optimizer
    mirrored = placement.sharding(Layout.MIRRORED)
    rows = placement.sharding(Layout.PER_TOWER)

    def device_step(params: PyTree, opt_state: PyTree, batch: PyTree) -> Any:
        def loss_fn(params: PyTree) -> jax.Array:
            return program.losses(params, batch).mean()

        both = jax.value_and_grad(loss_fn)(params)
        loss, grads = lax.pmean(both, DEVICE_AXIS)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        old = params, opt_state
        new = optax.apply_updates(params, updates), new_opt_state
        if guarded:
            new = keep_if_not_finite((loss, grads), new, old)
        return *new, loss

    whole = PartitionSpec()
    split = PartitionSpec(DEVICE_AXIS)
    run: Callable[..., Any] = jax.shard_map(
        device_step,
        mesh=placement.mesh,
        in_specs=(whole, whole, split),
        out_specs=whole,
        check_vma=False,
    )
    return jax.jit(
        run,
        in_shardings=(mirrored, mirrored, rows),
        out_shardings=mirrored,
        donate_argnums=(0, 1),
    )


def by_hand(program: Program, devices: Absent, guarded: bool = False) -> StepReport:
    """Report on the step as people write it by hand."""
    strategy = tj.Mirrored(devices=devices)
    params = program.params()
    opt_state = jax.eval_shape(program.optimizer.init, params)
    args = (params, opt_state, program.batch(len(devices)))
    jitted = hand_written(program, strategy.placement, guarded)
    return tj.tools.report_of(jitted, args, strategy)


def is_no_worse(ours: StepReport, hand: StepReport) -> bool:
    """Return whether our step is no worse than the hand-written one.

    It sends no more, holds no more (to 2 %), and reuses all donated buffers. The
    hand-written step should be a guarded one, because ours is guarded: a step that may
    change nothing keeps all gradients until it has seen the last one.
    """
    sent, by_hand = (sum(x.bytes for x in made.collectives) for made in (ours, hand))
    return (
        len(ours.collectives) <= len(hand.collectives)
        and sent <= by_hand + 16  # ours also sends a weight for each denominator
        and ours.memory.aliased == hand.memory.aliased
        and ours.memory.peak <= 1.02 * hand.memory.peak
    )


def _each(form: Callable[[Any], str]) -> Callable[[tuple], str]:
    """Return a form for values of several numbers of devices; equal ones show once."""

    def shown(values: tuple) -> str:
        return ", ".join(dict.fromkeys(map(form, values)))

    return shown


COLUMNS = {
    "program": "",
    "step": "",
    "state and batch": _each(lambda x: f"{x / 1e9:.3f} GB"),
    "peak memory": _each(lambda x: f"{x / 1e9:.3f} GB"),
    "all-reduces": _each(str),
    "sent": _each(lambda x: f"{x / 1e6:.1f} MB"),
    "meanwhile": _each(in_bytes),
    "kernels": _each(str),
}


def figures(made: StepReport) -> tuple[int, ...]:
    """Return the figures of one program on one number of devices."""
    return (
        made.memory.arguments,
        made.memory.peak,
        len(made.collectives),
        sum(found.bytes for found in made.collectives),
        sum(found.beside for found in made.collectives),
        made.kernels,
    )


def main() -> None:
    """Print the rows; end with status 1 if one is worse than the hand-written step."""
    parser = parser_of(__doc__)
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS], choices=PROGRAMS)
    parser.add_argument("--on", default="h200", help="a GPU, or a TPU topology")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 512])
    options = options_of(parser, programs=["mlp"], devices=[8])
    numbers = [None] if Absent.is_topology(options.on) else options.devices
    devices = [Absent(options.on, number) for number in numbers]
    counts = " and ".join(str(len(each)) for each in devices)
    table = begin(f"{counts} {devices[0].kind}", COLUMNS, options)
    good = True
    for name in options.programs:
        program = PROGRAMS[name]
        ours = [by_towerjax(program, tj.Mirrored(devices=x)) for x in devices]
        hand = [by_hand(program, x) for x in devices]
        guarded = [by_hand(program, x, guarded=True) for x in devices]
        good = good and all(map(is_no_worse, ours, guarded))
        steps = {"towerjax": ours, "by hand": hand, "by hand, guarded": guarded}
        for who, made in steps.items():
            table.row(name, who, *zip(*map(figures, made), strict=True))
    sys.exit(not good)


if __name__ == "__main__":
    main()
