"""Training steps of public programs, asked about as they are.

Of each: what `tj.testing.prove` says, whether `same_on_devices` finds that the results
depend on the number of devices, and what NumPy has its step change on one device and on
four ("by hand"). Packages which have nothing to do with a step, of data and logs, are
empty if they are not installed.
"""

import contextlib
import dataclasses
import functools
import importlib
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

import towerjax as tj
from tests.foreign.adapt import Absent, Devices, Made
from tests.foreign.program import DEPENDS, THE_SAME, Program, function, root_of

NOT_USED = (
    "algoperf._version ase cv2 dm_pix flaxformer h5py matscipy pandas pycolmap pyscf"
    " rawpy sentencepiece tensorboard tensorflow tensorflow_datasets tensorflow_text"
    " torch wandb wandb_osh"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfStep(Program):
    """A training step.

    Attributes:
      make: Of a module here and its function: ``devices -> (fn, args)``, the program's
        own step with global arguments.
      file: Where the step is in the sources.
      judged: What causes the answer.
      without: How the adapter leaves out what is held to be the cause.
      paths: Where Python finds its modules, within the repository.
    """

    make: str
    file: str
    judged: str
    without: dict[str, Any] = dataclasses.field(default_factory=dict)
    paths: tuple[str, ...] = ("",)
    KIND: ClassVar = "step"
    HEAD: ClassVar = ("program", "copies", "a run", "apart", "why")

    def ask(self, folder: pathlib.Path) -> dict[str, Any]:
        """What is said of the step, and what NumPy says."""
        root = root_of(self, folder)
        sys.path[:0] = [str(root / path) for path in self.paths]
        with contextlib.suppress(ImportError):  # it looks for TensorFlow's docstrings
            importlib.import_module("tensorflow_probability.substrates.jax")
        sys.meta_path.append(Absent(NOT_USED.split()))
        jax.config.update("jax_num_cpu_devices", 4)
        make = function("steps", self.make)
        made = functools.cache(lambda number: make(jax.devices()[:number]))

        def copied(devices: Devices) -> Made:  # what a step has donated is of copies
            fn, args = made(len(devices))
            return fn, jax.tree.map(lambda x: x.copy(), args)

        told: dict[str, Any] = {"of": make.__doc__, "hand": by_hand(copied)}
        if self.without:
            told["without"] = by_hand(functools.partial(make, **self.without))
        try:
            fn, args = copied(jax.devices())
            told["prove"] = str(tj.testing.prove(fn, *args))
        except tj.ReplicationError as error:
            told["prove"] = str(error)
        try:
            tj.testing.same_on_devices(copied)
        except tj.testing.SplitError:
            return told | {"depends": True}
        return told | {"depends": False}

    def says(self, told: dict[str, Any]) -> list[str]:
        """What `same_on_devices` found."""
        return [DEPENDS if told["depends"] else THE_SAME]

    def rows(self, told: dict[str, Any]) -> list[list[str]]:
        """A row, marked with the program's name."""
        at = f"`{self.repository}/{self.file}` at {self.commit}"
        notes = re.findall("^note: (.*)", told["prove"], re.MULTILINE)
        leaves = re.compile(r"^result.*?(?: and (\d+) more)?: each device")
        found = [leaves.match(note) for note in notes]
        differ = sum(int(note[1] or 0) + 1 for note in found if note)
        copies = re.search("stay the same: (.*)", told["prove"])
        alike = re.search(r"over .*: (.*) results are the same", told["prove"])
        proved = f"{alike[1]} the same" if alike else "no map"
        proved = f"{copies[1]} stay" if copies else proved
        proved += f", {differ} do not" if differ else ""
        hand = _apart(told["hand"])
        if "without" in told:
            hand += f", without the cause {_apart(told['without'])}"
        source = f"{at}: {told['of'].rstrip('.')}"
        judged = f"{self.judged} {mark(self.name)}"
        return [[source, proved, *self.says(told), hand, judged]]


def mark(name: str) -> str:
    """What stands in a row of a program of this name."""
    return f"<!-- {name} -->"


def by_hand(make: Callable[..., Made]) -> tuple[float, ...]:
    """The size of the step on one device and on four, and how far they are apart."""
    steps = []
    for number in (1, 4):
        fn, args = make(jax.devices()[:number])
        old = _first(args[0])
        out = fn(*args)
        is_whole = jax.tree.structure(out) == jax.tree.structure(args[0])
        steps.append(_first(out if is_whole else out[0]) - old)
    one, four = steps
    return tuple(float(np.linalg.norm(x)) for x in (one, four, four - one))


def _first(state: Any) -> np.ndarray:
    """The numbers of the first device's copy."""
    leaves = [x for x in jax.tree.leaves(state) if x.dtype.kind == "f"]
    copies = [x.addressable_shards[0].data for x in leaves]
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in copies])


def _apart(sizes: tuple[float, ...]) -> str:
    one, _, apart = sizes
    return f"{apart / one:.1e}"
