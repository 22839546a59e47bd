"""The share of the peak, by the number of multiplications of a matrix product."""

import numpy as np
import optax
import pytest

import towerjax as tj

ROWS, WIDTH = 24, 10


def loss_fn(params, batch, tower):
    return tj.Weighted.mean((batch @ params).sum(axis=1) ** 2, tower.weight)


@pytest.fixture(scope="module", params=[1, 4])
def built(request):
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(request.param)], towers=4)
    step = tj.build_train_step(loss_fn, optax.sgd(0.0), strategy, donate=False)
    return step, step.init(np.zeros((WIDTH, 3), np.float32)), request.param


@pytest.mark.slow
def test_it_is_the_flops_of_products_by_time_and_peak(built):
    step, state, devices = built
    batch = np.ones((ROWS, WIDTH), np.float32)
    flops = 2 * 2 * ROWS * WIDTH * 3  # forward, and the gradient of the parameters
    share = tj.tools.mfu(step, state, batch, 0.5, peak_flops=1000)
    np.testing.assert_allclose(share, flops / 0.5 / (1000 * devices))
    assert tj.tools.mfu(step, state, batch, 0.25, peak_flops=1000) == 2 * share
    assert tj.tools.mfu(step, state, batch, 0.5) is None  # no peak of CPUs is known


def test_it_is_what_a_run_tells(built):
    step, state, _ = built
    batch = np.ones((ROWS, WIDTH), np.float32)
    _, history = tj.run(step, state, [batch] * 4, progress=False, peak_flops=1e9)
    summary = history.summary
    share = tj.tools.mfu(
        step, state, batch, 1 / summary.steps_per_second, peak_flops=1e9
    )
    np.testing.assert_allclose(share, summary.rates["mfu"], rtol=1e-6)


@pytest.mark.parametrize("given, text", [
    ((0.0, None), "step_s=0.0 must be a number of seconds > 0"),
    (("1", None), "step_s='1' must be a number of seconds"),
    ((1.0, 0), "peak_flops=0 must be the FLOP/s of one device"),
])  # fmt: skip
def test_numbers_are_checked(built, given, text):
    step, state, _ = built
    seconds, peak = given
    batch = np.ones((ROWS, WIDTH), np.float32)
    with pytest.raises(ValueError, match=text):
        tj.tools.mfu(step, state, batch, seconds, peak_flops=peak)
