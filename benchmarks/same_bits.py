"""Train many cases, and tabulate on which numbers of devices all bits agree.

Each case is trained on every number of devices. Every leaf of the final state
(parameters, optimizer state, tower-local variables, step, key) and every metric of
every step is compared, as bytes, with those on the first number.

Run: ``python -m benchmarks.same_bits [--only attention] [--ops AllReduce]``
"""

import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.catalogue import MODELS, OPTIMIZERS, Model
from benchmarks.harness import begin, options_of, parser_of
from towerjax import collectives
from towerjax.collectives import CrossTowerOps
from towerjax.loop.run import run
from towerjax.make.train import build_train_step
from towerjax.metrics.weighted import Weighted
from towerjax.step.state.train_state import TrainState
from towerjax.step.step import Step
from towerjax.tf1.estimator.model_fn import ModelSpec
from towerjax.tf1.estimator.optimizer import TowerOptimizer
from towerjax.tf1.estimator.replicate import replicate_model_fn
from towerjax.tf1.estimator.train import train_and_evaluate
from towerjax.towers.strategies import Mirrored, StateLayout
from towerjax.towers.variables import TowerLocal
from towerjax.types import PyTree, Reduction, TowerOutput
from towerjax.types.trees import key_data


@dataclasses.dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
      name: The name that the table shows.
      model: A key of `MODELS`.
      optimizer: A key of `OPTIMIZERS`.
      by_model_fn: Whether ``replicate_model_fn`` trains it.
      dtype: The dtype of the parameters.
      options: The options of ``build_train_step``.
    """

    name: str
    model: str = "mlp, dropout"
    optimizer: str = "clip, adam"
    by_model_fn: bool = False
    dtype: str = "float32"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def params(self) -> PyTree:
        """Return the parameters at which training starts."""
        dtype = jnp.dtype(self.dtype)
        return jax.tree.map(lambda x: x.astype(dtype), MODELS[self.model].params())

    def batches(self, towers: int, steps: int) -> Iterator[PyTree]:
        """Yield ragged batches, in which the last tower has three rows less."""
        model = MODELS[self.model]
        for step in range(steps):
            yield model.batch(model.rows * towers - 3, step)


_OPTIONS = (
    Case("2 micro-batches", options={"micro_batches": 2}),
    Case("3 micro-batches", options={"micro_batches": 3}),
    Case("guard gradients", options={"guard": "gradients"}),
    Case("non-finite ignored", options={"on_nonfinite": "ignore"}),
    Case(
        "non-finite ignored, conv", "conv 8", "momentum",
        options={"on_nonfinite": "ignore"},
    ),
    Case("non-finite skipped", "conv 8", options={"on_nonfinite": "skip"}),
    Case("bfloat16 parameters", dtype="bfloat16"),
    Case("model_fn", by_model_fn=True),
    Case("model_fn, attention", "attention", "MultiSteps", by_model_fn=True),
    Case("model_fn, conv", "conv 8", "momentum", by_model_fn=True),
)  # fmt: skip


def cases() -> dict[str, Case]:
    """Return all cases: each model, each optimizer, each option."""
    found = [Case(name, model=name) for name in MODELS]
    found += [Case(name, optimizer=name) for name in OPTIMIZERS]
    return {case.name: case for case in (*found, *_OPTIONS)}


LOCAL = {"seen": TowerLocal(np.float32(0), Reduction.SUM)}


def train_step(case: Case, strategy: Mirrored) -> Step:
    """Return a case's step, with tower-local variables as in `LOCAL`."""
    model = MODELS[case.model]

    def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> TowerOutput:
        losses = model.losses(params, batch, tower)
        return TowerOutput(
            loss=Weighted.mean(losses, tower.weight * batch["weight"]),
            metrics={"large": Weighted.mean(losses > 1, tower.weight)},
            local={"seen": tower.local["seen"] + (losses * tower.weight).sum()},
        )

    optimizer = OPTIMIZERS[case.optimizer]
    options = {"remainder": "pad", **case.options}
    return build_train_step(loss_fn, optimizer, strategy, **options)


def _step_state(case: Case, strategy: Mirrored, steps: int) -> tuple[Any, Any]:
    step = train_step(case, strategy)
    state = step.init(case.params(), local=LOCAL, rng=jax.random.key(7))
    batches = case.batches(strategy.num_towers, steps)
    return run(step, state, batches, progress=False, audit=False)


def _model_state(case: Case, strategy: Mirrored, steps: int) -> tuple[Any, Any]:
    model: Model = MODELS[case.model]
    optimizer = TowerOptimizer(OPTIMIZERS[case.optimizer])

    def model_fn(variables, features, labels, mode, tower):  # type: ignore
        def loss_fn(params: PyTree) -> Weighted:
            losses = model.losses(params, {"x": features["x"], "y": labels}, tower)
            return Weighted.mean(losses, tower.weight * features["weight"])

        loss, train_op = optimizer.minimize(loss_fn, variables)
        return ModelSpec(mode, loss=loss, train_op=train_op)

    def batches() -> Iterator[PyTree]:
        for batch in case.batches(strategy.num_towers, steps):
            labels = batch.pop("y")
            yield batch, labels

    params = jax.tree.map(jnp.asarray, case.params())
    return train_and_evaluate(
        replicate_model_fn(model_fn, devices=strategy),
        batches,
        variables=TrainState.create(params, optimizer),
        steps=steps,
        progress=False,
    )


def trained(case: Case, strategy: Mirrored, steps: int) -> dict[str, np.ndarray]:
    """Train a case, and return the final state and all metrics by name."""
    train = _model_state if case.by_model_fn else _step_state
    state, history = train(case, strategy, steps)
    tree = {"state": state, "metrics": dict(history.metrics)}
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    numbers = {
        jax.tree_util.keystr(path): np.asarray(key_data(x)) for path, x in leaves
    }
    for name, x in numbers.items():
        if not np.isfinite(x.astype(np.float32)).all():
            raise FloatingPointError(f"{case.name}: {name} is not finite")
    for name, start in case.params().items():
        if (np.asarray(state.params[name]) == start).all():
            raise FloatingPointError(f"{case.name}: parameter {name!r} did not move")
    return numbers


@dataclasses.dataclass(frozen=True)
class Compared:
    """The result of comparing a case's trainings.

    Attributes:
      case: Its name.
      leaves: How many leaves were compared.
      differing: For each number of devices, the leaves whose bits differ from those
        of a mirrored state on the first number of devices.
      digests: For each number of devices, a digest of all bits, to compare with other
        machines.
    """

    case: str
    leaves: int
    differing: dict[int, list[str]]
    digests: dict[int, str]


def compare(
    case: Case,
    *,
    towers: int,
    devices: Sequence[int],
    steps: int,
    ops: CrossTowerOps,
    state: StateLayout = "mirrored",
) -> Compared:
    """Compare a training on several numbers of devices with a mirrored one."""
    platform = jax.default_backend()

    def run_on(number: int, state: StateLayout) -> dict[str, np.ndarray]:
        names = tuple(f"{platform}:{i}" for i in range(number))
        how: Any = {"towers": towers, "cross_tower_ops": ops, "state": state}
        return trained(case, Mirrored(names, tower_loop="scan", **how), steps)

    runs = {number: run_on(number, state) for number in devices}
    first = runs[devices[0]] if state == "mirrored" else run_on(devices[0], "mirrored")
    differing = {
        number: [n for n in first if first[n].tobytes() != found[n].tobytes()]
        for number, found in runs.items()
    }
    digests = {
        number: hashlib.sha256(b"".join(x.tobytes() for x in found.values()))
        for number, found in runs.items()
    }
    digests = {number: x.hexdigest()[:16] for number, x in digests.items()}
    return Compared(case.name, len(first), differing, digests)


def _counts(differing: dict[int, list[str]]) -> str:
    """Return how many leaves differ, for each number of devices, as text."""
    return ", ".join(f"D={number}: {len(x)}" for number, x in differing.items())


def _distinct(digests: dict[int, str]) -> str:
    """Return each different digest once, as text."""
    return ", ".join(dict.fromkeys(digests.values()))


COLUMNS = {"case": "", "leaves": "", "differing": _counts, "digests": _distinct}


def main() -> None:
    """Print the table; end with status 1 if bits differ."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--towers", type=int, default=8)
    parser.add_argument(
        "--devices", type=int, nargs="+", help="default: those of 1, 2, 4 and 8 here"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ops", default="PinnedTree", help="a cross-tower op's name")
    parser.add_argument("--state", default="mirrored", choices=get_args(StateLayout))
    options = options_of(parser, only="linear", devices=[1, 2], steps=3)
    jax.config.update("jax_num_cpu_devices", max(options.devices or [8]))
    options.devices = options.devices or [
        number for number in (1, 2, 4, 8) if number <= jax.device_count()
    ]
    ops = getattr(collectives, options.ops)()
    differ = False
    about = (
        f"{options.towers} towers, {ops!r}, state={options.state!r}; how many leaves"
    )
    about += f" differ from those on {options.devices[0]} device(s)"
    table = begin(about, COLUMNS, options)
    for case in cases().values():
        if options.only not in case.name:
            continue
        found = compare(
            case,
            towers=options.towers,
            devices=options.devices,
            steps=options.steps,
            ops=ops,
            state=options.state,
        )
        differ = differ or any(found.differing.values())
        table.row(*dataclasses.asdict(found).values())
    sys.exit(int(differ))


if __name__ == "__main__":
    main()
