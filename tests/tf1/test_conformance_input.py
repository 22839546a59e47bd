"""What the original promises of input and of steps in a loop, in numbers."""

import jax
import numpy as np
import optax
import pytest
from conformance_table import Table

import towerjax as tj

TABLE = Table("input step_fn", {})


def towers_of(case):
    if case["id"] == "step_fn.train":  # each of its numbers of towers
        return max(case["input"]["n"])
    return case["input"].get("n", case["input"].get("workers", 1))


def steps_of(strategy, source):
    """What each tower is given at each step, until the data ends."""
    dataset = strategy.distribute_dataset(source, split="elements", remainder="drop")
    return [
        [
            [int(x) for x in element] if isinstance(element, tuple) else [int(element)]
            for t in range(strategy.num_towers)
            for element in [strategy.select_tower(step, t)]
        ]
        for step in dataset.per_tower()
    ]


@TABLE.checks("input.one_device")
def check_one_device(case, strategy):
    steps = steps_of(strategy, case["input"]["data"])
    assert [step[0] for step in steps] == case["expected"]["steps"]


@TABLE.checks("input.tuple")
def check_tuple(case, strategy):
    source = zip(range(10), np.arange(10) ** 2, strict=True)
    assert steps_of(strategy, source) == case["expected"]["steps"]


@TABLE.checks("input.reinit")
def check_reinit(case, strategy):
    dataset = strategy.distribute_dataset(lambda: range(10), split="elements")
    passes = [[int(placed.arrays[0]) for placed in dataset] for _ in range(2)]
    assert passes == [list(range(10))] * 2
    assert len(passes[0]) == case["expected"]["first_pass"]
    assert len(passes[1]) == case["expected"]["after_reinit"]


@TABLE.checks("input.multiworker.1x2")
def check_two_workers(case, strategy):
    # Worker w reads every second element, as the original shards; the towers of one
    # process stand for two workers' (real ones: tests/mesh/test_processes.py).
    source = zip(range(0, 8, 2), range(1, 8, 2), strict=True)
    elements = (x for both in source for x in both)
    steps = [[x for (x,) in step] for step in steps_of(strategy, elements)]
    assert steps == case["expected"]["steps"]


@TABLE.checks("step_fn.train")
def check_step_fn(case, strategy):
    """Gradients summed over towers, 2 iterations a call, 5 calls."""
    rate = case["input"]["lr"]
    optimizer = optax.sgd(rate)

    all_devices = strategy.worker_devices
    for towers in case["input"]["n"]:
        strategy = tj.tf1.MirroredStrategy(devices=all_devices[:towers], towers=towers)

        def step(ctx, carry, x, strategy=strategy):
            def tower_fn(tower, params, x):
                def loss(params):
                    return ((params["w"] * x.sum() + params["b"] - 1) ** 2).sum()

                value, grads = jax.value_and_grad(loss)(params)
                ctx.set_last_step_output("loss", value, tj.Reduction.MEAN)
                return grads

            params, state = carry
            grads = ctx.call_for_each_tower(tower_fn, params, x)
            grads = strategy.reduce(tj.Reduction.SUM, grads)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state

        params = {"w": np.float32(0.3), "b": np.float32(0)}
        carry = (params, optimizer.init(params))
        errors = [0.3 - 1]
        source = [np.ones(1, np.float32)] * (10 * towers)
        data = iter(strategy.distribute_dataset(source, split="elements"))
        for _ in range(5):
            ctx = strategy.run_steps_on_dataset(step, data, 2, carry)
            carry = ctx.final
            errors.append(float(carry[0]["w"] + carry[0]["b"] - 1))
        factor = case["expected"]["factor_per_step"][str(towers)]
        np.testing.assert_allclose(
            errors[1:], np.multiply(errors[:-1], factor**2), atol=case["tol"]
        )
        assert (np.diff(np.abs(errors)) <= 0).all() and ctx.iterations == 2


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("id, one_device", TABLE.runs(towers_of))
def test_case(id, one_device):
    TABLE.run(id, towers_of, one_device)
