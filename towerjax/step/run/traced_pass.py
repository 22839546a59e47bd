"""A pass as it was traced: one tower's program."""

import dataclasses
import functools

import jax

from towerjax.step.run.on_device import on_device
from towerjax.step.run.one_pass import Pass
from towerjax.step.state.accumulators import TowersOwn, layouts_of
from towerjax.towers.on_towers import OnTowers
from towerjax.types import PyTree
from towerjax.types.leaves import map_parts


@dataclasses.dataclass(frozen=True, eq=False)
class TracedPass:
    """A pass: one tower's program, which is what all towers run."""

    pass_: Pass
    args: tuple[PyTree, ...]  # the shapes of its arguments, as global values
    towers: OnTowers

    @property
    def out(self) -> tuple[PyTree, PyTree]:
        """The shapes of what it merged and looked at, as global values."""
        count = self.pass_.strategy.placement.num_towers

        def of(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((x.shape[0] * count, *x.shape[1:]), x.dtype)

        return map_parts(TowersOwn, lambda own: jax.tree.map(of, own), self.towers.out)

    def run(self, args: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """The results, of and as global values."""
        shards = self.pass_.shards(args, self.towers.out)
        return self.towers.run(layouts_of(self.towers.out), args, shards=shards)


def trace_pass(pass_: Pass, args: tuple[PyTree, ...]) -> TracedPass:
    """The pass, traced for arguments of these shapes."""
    run = functools.partial(on_device, pass_)
    layouts = (*pass_.ins.values(),)
    towers = OnTowers(run, pass_.strategy.placement, layouts, args)
    return TracedPass(pass_, args, towers)
