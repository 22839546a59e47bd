"""Training steps of public programs, checked as they are, and a table of what was said.

The sources are read from a folder that holds their repositories, at the commits of
`PROGRAMS`: ``FOLDER/brax``, ``FOLDER/flax``. Each program runs in a process of its own.
"By hand" is what its step changes, as NumPy has it of one device and of four.

Run: ``python -m benchmarks.foreign FOLDER [--only brax_ppo] [--page
docs/public_code.md]``. The packages that it needs are named on the page; those
which have nothing to do with a step, of data and logs, are empty if not installed.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import towerjax as tj
from benchmarks.foreign import rl, supervised
from benchmarks.foreign.adapt import Absent, Devices, Made

NOT_USED = (
    "algoperf._version ase cv2 dm_pix flaxformer h5py matscipy pandas pycolmap pyscf"
    " rawpy sentencepiece tensorboard tensorflow tensorflow_datasets tensorflow_text"
    " torch wandb wandb_osh"
)
START = "<!-- rows -->\n"
END = "<!-- end -->"
HEAD = (
    "| program | prove | same_on_devices | by hand | what it is |\n" + "|---" * 5 + "|"
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: where it is from, how it is called, and what it turned out to be.

    Attributes:
      make: ``devices -> (fn, args)``, its own step with global arguments.
      repository: ``owner/name`` at GitHub.
      commit: Of its sources.
      file: Of the step.
      depends: Whether its step depends on the number of devices.
      judged: What it is.
      without: How the adapter leaves out what is held to be the cause.
      paths: Where Python finds its modules, within the repository.
    """

    make: Callable[..., Made]
    repository: str
    commit: str
    file: str
    depends: bool
    judged: str
    without: dict[str, Any] | None = None
    paths: tuple[str, ...] = ("",)

    @property
    def name(self) -> str:
        """The name of the adapter."""
        return self.make.__name__


_ADVANTAGES = "Advantages are normalised by the rows of a device."
PROGRAMS = [
    Program(
        rl.brax_ppo,
        "google/brax",
        "0b96d05",
        "brax/training/agents/ppo/losses.py",
        True,
        _ADVANTAGES,
        {"normalize_advantage": False, "entropy_cost": 0.0},
    ),
    Program(
        rl.brax_apg,
        "google/brax",
        "0b96d05",
        "brax/training/agents/apg/train.py",
        True,
        "A device's own gradient is clipped, and then averaged.",
        {"bound": 1e9},
    ),
    Program(
        rl.ferminet,
        "google-deepmind/ferminet",
        "0ce3411",
        "ferminet/train.py",
        False,
        "Right: it clips about the median of what all devices have.",
    ),
    Program(
        supervised.kfac,
        "google-deepmind/kfac-jax",
        "babd853",
        "kfac_jax/_src/optimizer.py",
        False,
        "Right: on steps that do not synchronise factors, each device keeps its own.",
    ),
    Program(
        supervised.nequix,
        "atomicarchitects/nequix",
        "0ffdf88",
        "nequix/train.py",
        True,
        "Losses are divided by a device's own atoms, and then averaged.",
        {"atoms": 4},
    ),
    Program(
        supervised.scenic,
        "google-research/scenic",
        "4a38d47",
        "scenic/train_lib/classification_trainer.py",
        True,
        "A loss is divided by a device's own mask, and then averaged.",
        {"masked": 0},
    ),
    Program(
        supervised.multinerf,
        "google-research/multinerf",
        "5b4d4f6",
        "internal/train_utils.py",
        True,
        "A loss is divided by the weights of a device's own rays, and then averaged.",
        {"heavy": 1.0},
    ),
    Program(
        supervised.flax_imagenet,
        "google/flax",
        "18f8f31",
        "examples/imagenet/train.py",
        False,
        "Right: its BatchNorm takes the rows of all devices.",
        paths=("examples/imagenet",),
    ),
    Program(
        supervised.flax_lm1b,
        "google/flax",
        "18f8f31",
        "examples/lm1b/train.py",
        False,
        "Right: one global program.",
        paths=("examples/lm1b",),
    ),
    Program(
        supervised.haiku_imagenet,
        "google-deepmind/dm-haiku",
        "f4d858a",
        "examples/imagenet/train.py",
        True,
        "Its BatchNorm takes a device's own rows, of which each device keeps its own"
        " statistics; evaluation takes the first one's. Meant, as a comment says.",
    ),
    Program(
        supervised.vit,
        "google-research/vision_transformer",
        "c6de1e5",
        "vit_jax/train.py",
        False,
        "Right.",
    ),
    Program(
        supervised.vit_dropout,
        "google-research/vision_transformer",
        "c6de1e5",
        "vit_jax/train.py",
        True,
        "Each device draws its own dropout: meant.",
    ),
    Program(
        supervised.big_vision,
        "google-research/big_vision",
        "0127fb6",
        "big_vision/train.py",
        False,
        "Right: one global program.",
    ),
    Program(
        supervised.big_vision_mixup,
        "google-research/big_vision",
        "0127fb6",
        "big_vision/train.py",
        True,
        "Images are mixed with the next of their device: meant, as a comment says.",
    ),
    Program(
        supervised.algoperf,
        "mlcommons/algorithmic-efficiency",
        "2c90454",
        "algorithms/baselines/external_tuning/jax_nadamw_full_budget.py",
        False,
        "Right: one global program, which divides a sum by the weights of all rows.",
    ),
]


def by_hand(make: Callable[..., Made]) -> tuple[float, float, float]:
    """The size of the step on one device and on four, and how far they are apart."""
    steps = []
    for number in (1, 4):
        fn, args = make(jax.devices()[:number])
        old = _first(args[0])
        out = fn(*args)
        is_whole = jax.tree.structure(out) == jax.tree.structure(args[0])
        steps.append(_first(out if is_whole else out[0]) - old)
    one, four = steps
    norm = lambda x: float(np.linalg.norm(x))  # noqa: E731
    return norm(one), norm(four), norm(four - one)


def _first(state: Any) -> np.ndarray:
    """The numbers of the first device's copy."""
    leaves = [x for x in jax.tree.leaves(state) if x.dtype.kind == "f"]
    copies = [x.addressable_shards[0].data for x in leaves]
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in copies])


def check(program: Program, folder: pathlib.Path) -> dict[str, Any]:
    """What is said of a program, and what NumPy says."""
    root = folder / program.repository.partition("/")[2]
    found = subprocess.check_output(["git", "-C", root, "rev-parse", "HEAD"], text=True)
    if not found.startswith(program.commit):
        raise ValueError(f"{root} is at {found.strip()}, not at {program.commit}.")
    sys.path[:0] = [str(root / path) for path in program.paths]
    with contextlib.suppress(ImportError):  # it looks for TensorFlow's docstrings
        importlib.import_module("tensorflow_probability.substrates.jax")
    sys.meta_path.append(Absent(NOT_USED.split()))
    jax.config.update("jax_num_cpu_devices", 4)
    made = functools.cache(lambda number: program.make(jax.devices()[:number]))

    def make(devices: Devices) -> Made:  # what a step has donated is made of copies
        fn, args = made(len(devices))
        return fn, jax.tree.map(lambda x: x.copy(), args)

    row: dict[str, Any] = {"hand": by_hand(make)}
    if program.without:
        row["without"] = by_hand(functools.partial(program.make, **program.without))
    try:
        fn, args = make(jax.devices())
        row["prove"] = str(tj.testing.prove(fn, *args))
    except tj.ReplicationError as error:
        row["prove"] = str(error)
    try:
        tj.testing.same_on_devices(make)
    except tj.testing.SplitError:
        return row | {"depends": True}
    return row | {"depends": False}


def row_of(program: Program, told: dict[str, Any]) -> str:
    """A row of the page."""
    at = f"`{program.repository}/{program.file}` at {program.commit}"
    source = f"{at}: {str(program.make.__doc__).rstrip('.')}"
    notes = re.findall("^note: (.*)", told["prove"], re.MULTILINE)
    leaves = re.compile(r"^result.*?(?: and (\d+) more)?(?=: each device)")
    notes = [leaves.sub(lambda x: f"{int(x[1] or 0) + 1} do not", x) for x in notes]
    copies = re.search("stay the same: (.*)", told["prove"])
    alike = re.search(r"over .*: (.*) results are the same", told["prove"])
    proved = f"{alike[1]} results are the same" if alike else "no map"
    proved = "; ".join([f"{copies[1]} copies stay" if copies else proved, *notes])
    said = "depends" if told["depends"] else "the same"
    hand = _sizes(told["hand"])
    if "without" in told:
        hand += f"; without the cause {_sizes(told['without'])}"
    cells = source, proved, said, hand, f"{program.judged} <!-- {program.name} -->"
    return f"| {' | '.join(x.replace('|', '/') for x in cells)} |"


def _sizes(sizes: tuple[float, float, float]) -> str:
    one, four, apart = sizes
    return f"{one:.4g}, {four:.4g}: {apart / one:.1e} apart"


def main() -> None:
    """Check the programs, each in a process of its own, and write the page."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", default=[x.name for x in PROGRAMS])
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--here", action="store_true", help="in this process, as JSON")
    options = parser.parse_args()
    chosen = {x.name: x for x in PROGRAMS if x.name in options.only}
    if options.here:
        [program] = chosen.values()
        print(json.dumps(check(program, options.folder)))
        return
    wrong = []
    for name, program in chosen.items():
        start = time.perf_counter()
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.foreign"]
        command += [options.folder, "--only", name, "--here"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-3000:])
            wrong.append(name)
            continue
        told = json.loads(done.stdout.splitlines()[-1])
        row = row_of(program, told)
        print(f"{row}\n{time.perf_counter() - start:.0f} s", flush=True)
        wrong += [name] * (told["depends"] != program.depends)
        if options.page:
            write(options.page, name, row)
    if wrong:
        sys.exit(f"Failed, or another answer than expected: {wrong}")


def write(page: pathlib.Path, name: str, row: str) -> None:
    """Put the row of a program in place of its last one."""
    head, _, rest = page.read_text().partition(START)
    rows, _, tail = rest.partition(END)
    kept = [x for x in rows.splitlines() if "<!--" in x and f"<!-- {name} -->" not in x]
    order = [f"<!-- {x.name} -->" for x in PROGRAMS]
    new = sorted([*kept, row], key=lambda x: [mark in x for mark in order].index(True))
    page.write_text(head + START + "\n".join([HEAD, *new, ""]) + END + tail)


if __name__ == "__main__":
    main()
