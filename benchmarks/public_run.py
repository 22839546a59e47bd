"""Train a public model as pip installs it; its bits agree on any number of devices.

The model is the GPT-2 of `transformers` 4.46 for Flax, at a small width, with dropout.
It is trained on the bytes of Python's standard library. The SHA-256 of the whole state
(parameters, Adam's moments, step, key) is taken every 50 steps: on 1, 2, 4 and 8
devices, mirrored and sharded, in one process and in two, and with a kill and moves from
4 to 2 to 8 devices. Controls differ: the plain all-reduce, and by hand ``pmean`` and
one ``jit`` of all rows.

Run: ``pip install 'transformers==4.46.3'``, ``python -m benchmarks.public_run``; with
``--steps 300``, which is the default, and ``--only "by hand"`` for some of the rows.
``--absent h200`` compiles instead for 1 to 8 GPUs that are not here, and counts the
kernels that differ from those for one GPU.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import towerjax as tj
from benchmarks.harness import begin, options_of, parser_of
from benchmarks.same_kernels import kernels_of

TOWERS = 8
ROWS = 32
LENGTH = 48
EVERY = 50
ON = (1, 2, 4, 8)  # devices
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
        optax.warmup_cosine_decay_schedule(0, 2e-3, 30, 300), weight_decay=0.01
    ),
)


@functools.cache
def model() -> Any:
    """Return GPT-2 with two layers, 64 wide, over bytes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import FlaxGPT2LMHeadModel, GPT2Config  # type: ignore

    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4
    )
    return FlaxGPT2LMHeadModel(config, seed=0, input_shape=(1, LENGTH))


def token_losses(params: Any, tokens: jax.Array, rng: jax.Array) -> jax.Array:
    """Return the cross-entropy of each next byte, with dropout, ``[b, L - 1]``."""
    words = jnp.maximum(tokens, 0)
    logits = model()(words, params=params, dropout_rng=rng, train=True).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], words[:, 1:])


def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.Weighted:
    """Return the mean over the bytes that exist: rows end early, at many lengths."""
    losses = token_losses(params, batch["tokens"], tower.rng)
    there = (batch["tokens"][:, 1:] >= 0) * tower.weight[:, None]
    return tj.Weighted.mean(losses, there)


def batches(stop: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of 29 rows of 8 to 48 bytes, with -1 after a row's end."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    text = b"".join((folder / f"{x}.py").read_bytes() for x in ("argparse", "typing"))
    for number in range(stop):
        draw = np.random.default_rng((0, number))
        starts = draw.integers(len(text) - LENGTH, size=ROWS - 3)
        rows = np.frombuffer(text, np.uint8)[starts[:, None] + np.arange(LENGTH)]
        ends = draw.integers(8, LENGTH + 1, size=(ROWS - 3, 1))
        yield {"tokens": np.where(np.arange(LENGTH) < ends, rows.astype(np.int32), -1)}


def digest(tree: Any) -> str:
    """Return the first 16 digits of the SHA-256 of all leaves' bytes."""

    def as_numbers(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    saved = map(as_numbers, jax.tree.leaves(tj.towers.saved_values(tree)))
    return hashlib.sha256(b"".join(x.tobytes() for x in saved)).hexdigest()[:16]


def say(number: int, digest: str) -> None:
    """Print a digest for the process that started this job; one process prints it."""
    if jax.process_index() == 0:
        print(json.dumps(["hash", number, digest]), flush=True)


@dataclasses.dataclass(frozen=True)
class Run:
    """A row of the table: where a training runs, and how its towers are summed."""

    name: str
    kind: str = "PinnedTree"  # or "AllReduce"; by hand: "pmean", "jit"
    devices: tuple[int, ...] = (1,)  # one after another, from checkpoints
    state: str = "mirrored"
    processes: int = 1


def on(devices: int) -> str:
    """Return a number of devices in words."""
    return "1 device" if devices == 1 else f"{devices} devices"


def runs() -> list[Run]:
    """Return all rows of the table."""
    found = []
    for state in ("mirrored", "sharded"):
        for d in ON:
            found.append(Run(f"{state}, {on(d)}", devices=(d,), state=state))
        two: Any = {"devices": (8,), "state": state, "processes": 2}
        found.append(Run(f"{state}, 2 processes of 4", **two))
        name = f"{state}, 4 devices, killed, 2, then 8"
        found.append(Run(name, devices=(4, 2, 8), state=state))
    controls = {"AllReduce": "plain all-reduce"}
    controls |= {"pmean": "`pmean` by hand", "jit": "`jit` by hand"}
    for kind, text in controls.items():
        for d in (1, 8):
            found.append(Run(f"{text}, {on(d)}", kind, (d,)))
    return found


def parts_of(run: Run, steps: int) -> list[tuple[int, int, bool]]:
    """Return ``(devices, last step, killed)`` of each process, one after another."""
    if len(run.devices) == 1:
        return [(run.devices[0], steps, False)]
    first, second, third = run.devices
    at = steps // 2 // EVERY * EVERY
    return [(first, at - 20, True), (second, at + EVERY, False), (third, steps, False)]


PINNED: Any = {"tower_loop": "scan", "cross_tower_ops": tj.PinnedTree()}


def differing_kernels(target: str, state: str) -> dict[int, int]:
    """Return by ``D`` how many kernels for ``D`` absent GPUs differ from one's."""
    shapes = jax.eval_shape(lambda: model().params)
    found = {}
    for d in ON:
        absent = tj.Absent(target, d)
        strategy = tj.Mirrored(absent, towers=TOWERS, state=state, **PINNED)  # type: ignore
        step = tj.build_train_step(loss_fn, OPTIMIZER, strategy, remainder="pad")
        [batch] = batches(1)
        found[d] = kernels_of(step.program(shapes, batch).call.as_text())
        print(f"{d} {target}: {found[d].total()} kernels", file=sys.stderr, flush=True)
    one = found[1]
    return {d: ((now - one) + (one - now)).total() for d, now in found.items()}


def train(run: Run, devices: int, last: int, killed: bool, folder: str) -> None:
    """Train up to a step, from the checkpoint in the folder if there is one."""
    names = [f"cpu:{i}" for i in range(devices)] if run.processes == 1 else None
    how: Any = PINNED if run.kind == "PinnedTree" else {}
    strategy = tj.Mirrored(names, towers=TOWERS, state=run.state, **how)  # type: ignore
    step = tj.build_train_step(loss_fn, OPTIMIZER, strategy, remainder="pad")
    state = step.init(model().params, rng=jax.random.key(7))

    def tell(number: int, state: tj.TrainState, logs: Any) -> None:
        say(number, digest(state))

    def die(number: int, logs: Any) -> None:
        if killed and number == last:
            os.kill(os.getpid(), signal.SIGKILL)

    files = tj.Checkpointer(folder, every=EVERY) if len(run.devices) > 1 else None
    hooks = [tj.loop.WithState(tell, every=EVERY), die]
    how = {"steps": last, "checkpointer": files, "hooks": hooks, "audit": False}
    tj.run(step, state, [*batches(last)], progress=False, **how)


def train_by_hand(kind: str, devices: int, last: int) -> None:
    """Train as most people write it.

    That is ``pmean`` of the devices' gradients, or one ``jit`` of split rows.
    """
    mesh = Mesh(np.array(jax.devices()[:devices]), "d")
    here = PartitionSpec("d")

    def loss(params: Any, tokens: jax.Array, rng: jax.Array) -> jax.Array:
        there = tokens[:, 1:] >= 0
        losses = token_losses(params, tokens, rng)
        return (losses * there).sum() / jnp.maximum(there.sum(), 1)

    def of_device(params: Any, tokens: jax.Array, rng: jax.Array) -> Any:
        rng = jax.random.fold_in(rng, lax.axis_index("d"))
        return lax.pmean(jax.grad(loss)(params, tokens, rng), "d")

    grads_of: Any = jax.grad(loss)
    if kind == "pmean":
        how: Any = {"mesh": mesh, "check_vma": False, "out_specs": PartitionSpec()}
        specs = (PartitionSpec(), here, PartitionSpec())
        grads_of = jax.shard_map(of_device, in_specs=specs, **how)

    @jax.jit
    def step(params: Any, opt_state: Any, tokens: jax.Array, rng: jax.Array) -> Any:
        grads = grads_of(params, tokens, rng)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = model().params
    state = params, OPTIMIZER.init(params)
    for number, batch in enumerate(batches(last), 1):
        padding = np.full((3, LENGTH), -1, np.int32)
        tokens = np.concatenate([batch["tokens"], padding])
        tokens = jax.device_put(tokens, NamedSharding(mesh, here))
        state = step(*state, tokens, jax.random.key(number))
        if number % EVERY == 0:
            say(number, digest(state))


def hashes(run: Run, steps: int) -> dict[int, str]:
    """Train in processes of their own, and return the digest of each step."""
    found: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for devices, last, killed in parts_of(run, steps):
            what = json.dumps([dataclasses.asdict(run), devices, last, killed, folder])
            command = [sys.executable, "-m", "benchmarks.public_run", "--worker", what]
            if run.processes > 1:
                each = str(devices // run.processes)
                words = ["launch", "--processes", str(run.processes)]
                words += ["--devices-per-process", each, "--"]
                command = [sys.executable, "-m", "towerjax", *words, *command]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode != (-signal.SIGKILL if killed else 0):
                raise RuntimeError(f"{run.name}: status {done.returncode}")
            for line in done.stdout.splitlines():
                if (at := line.find('["hash"')) >= 0:  # the launcher's prefix ends here
                    _, number, text = json.loads(line[at:])
                    found[number] = text
    return found


def shown(row: dict[int, str], first: dict[int, str]) -> list[str]:
    """Return eight digits for each 50 steps, bold if they differ from the first row."""
    return [x[:8] if x == first[n] else f"**{x[:8]}**" for n, x in row.items()]


def main() -> None:
    """Print the table; end with status 1 if a run's hashes differ from the first's."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--absent", help="GPUs to compile for, as tj.Absent takes them")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = options_of(parser, steps=EVERY, only="1 device")
    if options.worker:
        fields, devices, last, killed, folder = json.loads(options.worker)
        run = Run(**fields)
        if run.processes > 1:
            tj.cluster.initialize()
        else:
            jax.config.update("jax_num_cpu_devices", devices)
        if run.kind in ("pmean", "jit"):
            return train_by_hand(run.kind, devices, last)
        return train(run, devices, last, killed, folder)
    if options.absent:
        columns = {"state": "", **{f"D={d}": "" for d in ON}}
        about = f"kernels that are not those for one {options.absent}"
        table = begin(about, columns, options)
        for state in ("mirrored", "sharded"):
            table.row(state, *differing_kernels(options.absent, state).values())
        return
    found: dict[str, dict[int, str]] = {}
    about = f"{TOWERS} towers; bold where it is not the first row's"
    steps = range(EVERY, options.steps + 1, EVERY)
    columns = {"run": "", **{f"step {number}": "" for number in steps}}
    table = begin(about, columns, options)
    for run in runs():
        if options.only in run.name:
            found[run.name] = hashes(run, options.steps)
            first = next(iter(found.values()))
            table.row(run.name, *shown(found[run.name], first))
    first = next(iter(found.values()))
    ours = [found[x.name] for x in runs() if x.kind == "PinnedTree" and x.name in found]
    sys.exit(int(any(row != first for row in ours)))


if __name__ == "__main__":
    main()
