"""What is proved, without a run, of the losses of public models.

The models are made small, of random parameters; nothing is downloaded. Each loss is
what its source computes, returned as a mean over rows or words.
"""

import dataclasses
import functools
import pathlib
import time
from typing import Any, ClassVar

import jax
import numpy as np
import optax

import towerjax as tj
from tests.foreign.losses.given import ROWS, Loss
from tests.foreign.program import Program, function, root_of
from tests.one_tower_programs import answers_of_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfLoss(Program):
    """A loss; it is asked about with full batches, and with padded ones.

    Attributes:
      make: Of a module here and its function, which returns a `Loss`.
      given: Arguments of that function.
      remedy: What makes a proof of what is not proved.
    """

    make: str
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    remedy: str = ""
    KIND: ClassVar = "loss"
    HEAD: ClassVar = ("loss", "batches", "leaves", "proved", "CPU s", "why not")

    def ask(self, folder: pathlib.Path) -> list[dict[str, Any]]:
        """How many leaves are proved, with full batches and with padded ones."""
        make = function("losses", self.make)
        given = [root_of(self, folder)] if self.repository else []
        loss = make(*given, **self.given)
        return [asked(loss, padded) for padded in (False, True)]

    def says(self, told: list[dict[str, Any]]) -> list[str]:
        """For each layout of batches: "the same", or "not proved"."""
        return ["not proved" if each["unproved"] else "the same" for each in told]

    def rows(self, told: list[dict[str, Any]]) -> list[list[str]]:
        """A row for each layout of batches."""
        remedy = f"Remedy: {self.remedy}"
        rows = []
        for layout, each in zip(("full", "padded"), told, strict=True):
            why = "; ".join([*each["unproved"], remedy]) if each["unproved"] else ""
            numbers = f"{each['leaves']}", f"{each['proved']}", f"{each['seconds']:.1f}"
            rows.append([self.name, layout, *numbers, why])
        return rows


def asked(loss: Loss, padded: bool) -> dict[str, Any]:
    """How many leaves are proved, and what is said of the others."""
    start = time.process_time()
    said = said_of(loss, padded)
    unproved = [x for x in said if x.says != "proved"]
    return {
        "leaves": len(said),
        "proved": len(said) - len(unproved),
        "unproved": [*dict.fromkeys(f"{x.says}: {x.why}" for x in unproved)],
        "seconds": time.process_time() - start,
    }


def said_of(loss: Loss, padded: bool) -> list[Any]:
    """What is proved of each leaf that a train step of two towers merges."""
    strategy = tj.Mirrored(("cpu:0",), towers=2, axis_name="batch")
    remainder: Any = "pad" if padded else "error"
    how: dict[str, Any] = {"remainder": remainder, "audit": False}
    step = tj.build_train_step(loss.loss_fn, optax.sgd(0.1), strategy, **how)
    zeros = functools.partial(jax.tree.map, lambda x: np.zeros(x.shape, x.dtype))
    given: dict[str, Any] = {"rng": jax.random.key(0)}
    if loss.local is not None:
        given["local"] = tj.TowerLocal(zeros(loss.local), tj.Reduction.MEAN)
    state = step.init(zeros(loss.params), **given)
    return answers_of_step(step, state, loss.batch, rows=ROWS // step.num_calls)
