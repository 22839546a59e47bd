"""Which aggregation modes of text trainers depend on the split; docs have the table."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from aggregation_modes import MASK, MODES, W, X, losses_of, quotient
from checkout import ROOT
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import towerjax as tj

NUMBERS = (1, 2, 4)
SAME = "the same"
DEPENDS = "depends on the split"
PAGE = ROOT / "docs/how_to/text.md"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedMetric:
    unreduced_sum: Any
    denominator: Any


def averaged(mode):
    """Each device divides by its own weight, and devices are averaged."""

    def own(w, x, mask):
        return lax.pmean(quotient(*MODES[mode](losses_of(w, x), mask)), "i")

    return on_devices(own)


def added(mode):
    """Sums and weights are added up over devices, and divided once."""

    def own(w, x, mask):
        return quotient(*lax.psum(MODES[mode](losses_of(w, x), mask), "i"))

    return on_devices(own)


def on_devices(own):
    def make(devices):
        specs = (PartitionSpec(), PartitionSpec("i"), PartitionSpec("i"))
        how = {"mesh": Mesh(np.array(devices), "i"), "in_specs": specs}
        out = PartitionSpec()
        fn = jax.jit(jax.shard_map(own, out_specs=out, check_vma=False, **how))
        return fn, (W, X, MASK)

    return make


def in_micro_batches(mode):
    """The micro-batches' own quotients are averaged."""

    def make(number):
        def mean(w, x, mask):
            def body(total, rows):
                return total + quotient(*MODES[mode](losses_of(w, rows[0]), rows[1])), 0

            parts = [a.reshape(number, -1, *a.shape[1:]) for a in (x, mask)]
            return lax.scan(body, 0.0, parts)[0] / number

        return jax.jit(mean), (W, X, MASK)

    return make


def says(compare, make, **numbers):
    try:
        compare(make, **numbers)
    except tj.testing.SplitError:
        return DEPENDS
    return SAME


def table():
    """What the page says of each mode: averaged, and added up."""
    rows = re.findall(
        r"^\| `(.*?)` \| .*? \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.M
    )
    return {mode: (averaged, added) for mode, averaged, added in rows}


def test_the_page_has_each_mode():
    assert [*table()] == [*MODES]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_page_says_what_a_run_says(mode):
    compare = tj.testing.same_on_devices
    of_averages = says(compare, averaged(mode), devices=NUMBERS)
    of_sums = says(compare, added(mode), devices=NUMBERS)
    assert (of_averages, of_sums) == table()[mode]
    parts = in_micro_batches(mode)
    assert says(tj.testing.same_for, parts, micro_batches=NUMBERS) == of_averages


def unproved(make, **numbers):
    try:
        return tj.testing.prove(make, **numbers).unproved
    except tj.ReplicationError as error:
        return {"result": str(error)}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("mode", MODES)
def test_the_proof_says_the_same(mode):
    of_averages, of_sums = table()[mode]
    if of_averages == DEPENDS:
        assert unproved(averaged(mode), devices=NUMBERS)
        assert unproved(in_micro_batches(mode), micro_batches=NUMBERS)
    if of_sums == DEPENDS:
        assert unproved(added(mode), devices=NUMBERS)
    else:
        assert unproved(added(mode), devices=NUMBERS) == {}


def loss_of(mode, share=False):
    def loss_fn(params, batch, tower):
        losses = losses_of(params["w"], batch["x"])
        total, weight = MODES[mode](losses, batch["mask"])
        return WeightedMetric(total, weight / tower.num_towers if share else weight)

    return loss_fn


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_step_takes_the_sums_as_they_are(mode):
    batch = {"x": X, "mask": MASK}
    strategy = tj.Mirrored(towers=4)
    step = tj.build_train_step(loss_of(mode), optax.sgd(1.0), strategy)
    state = step.init({"w": W})
    if table()[mode][1] == DEPENDS:
        with pytest.raises(tj.testing.SplitError, match="1/T"):
            step(state, batch)
        return
    _, metrics = step(state, batch)
    assert step.unproved == {}
    total, weight = MODES[mode](losses_of(np.float64(W), np.float64(X)), MASK)
    assert float(metrics["loss"]) == pytest.approx(float(total / weight), rel=1e-5)


@pytest.mark.slow
def test_a_step_takes_a_share_of_a_norm():
    mode = "sequence-mean-token-sum-norm, norm=8"
    strategy = tj.Mirrored(towers=4)
    step = tj.build_train_step(loss_of(mode, share=True), optax.sgd(1.0), strategy)
    _, metrics = step(step.init({"w": W}), {"x": X, "mask": MASK})
    assert step.unproved == {}
    total, weight = MODES[mode](losses_of(np.float64(W), np.float64(X)), MASK)
    assert float(metrics["loss"]) == pytest.approx(float(total / weight), rel=1e-5)
