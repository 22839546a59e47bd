"""Losses that may raise, with `equinox.error_if`, are proved; wrong ones are not."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_tower_programs import answer_for

import towerjax as tj

DRAW = np.random.default_rng(0)
BATCH = {"x": DRAW.normal(size=(48, 3)).astype(np.float32)}
BATCH["y"] = BATCH["x"].sum(1)
PARAMS = {"w": np.float32([0.3, -0.2, 0.5])}


def loss_of(params, x, b, t):
    return tj.Sum((((x @ params["w"] - b["y"]) ** 2) * t.weight).sum())


class Right:
    def of_rows(params, b, t):
        return loss_of(params, eqx.error_if(b["x"], b["x"] > 9, "large"), b, t)

    def of_examples(params, b, t):
        is_large = (b["x"] > 9) & (t.weight > 0)[:, None]
        return loss_of(params, eqx.error_if(b["x"], is_large, "large"), b, t)

    def of_each_row(params, b, t):
        each = jax.vmap(lambda x: eqx.error_if(x, jnp.any(x > 9), "large"))
        return loss_of(params, each(b["x"]), b, t)

    def of_parameters(params, b, t):
        w = eqx.error_if(params["w"], params["w"] > 9, "large")
        return loss_of({"w": w}, b["x"], b, t)

    def of_a_gradient(params, b, t):
        def loss(w):
            x = eqx.error_if(b["x"], b["x"] > 9, "large")
            return (jnp.tanh(x @ w) * t.weight).sum()

        return tj.Sum(jax.grad(loss)(params["w"]))

    def one_of_two_errors(params, b, t):
        index = jnp.where(b["x"].max() > 5, 1, 0) * 0
        x = eqx.branched_error_if(b["x"], b["x"] > 9, index, ["large", "larger"])
        return loss_of(params, x, b, t)


class Wrong:
    """Not proved, each with a part of the reason."""

    def of_an_own_mean(params, b, t):
        "a mean over the tower's own rows"
        x = eqx.error_if(b["x"], b["x"].mean() > 9, "large")
        return loss_of(params, x, b, t)

    def of_centred_rows(params, b, t):
        "a mean over the tower's own rows"
        x = eqx.error_if(b["x"] - b["x"].mean(), b["x"] > 9, "large")
        return loss_of(params, x, b, t)

    def of_one_tower(params, b, t):
        "tower.id compared with zero"
        return loss_of(params, eqx.error_if(b["x"], t.id > 0, "second"), b, t)

    def nan_for_an_error(params, b, t):
        "a constant has an element for each row"
        x = eqx.error_if(b["x"], b["x"] > 9, "large", on_error="nan")
        return loss_of(params, x, b, t)

    def a_callback_that_returns(params, b, t):
        "pure_callback"
        x = b["x"]
        to = jax.ShapeDtypeStruct(x.shape, x.dtype)
        other = lambda x: jax.pure_callback(lambda x: 2 * x, to, x)  # noqa: E731
        x = jax.lax.cond(eqxi.unvmap_any(x > 0), other, lambda x: x, x)
        return loss_of(params, x, b, t)

    def chosen_by_any(params, b, t):
        "no rule for a choice by a maximum"
        x = jnp.where(eqxi.unvmap_any(b["x"] > 1), b["x"], 0)
        return loss_of(params, x, b, t)


def functions(deck):
    return {name: fn for name, fn in vars(deck).items() if not name.startswith("_")}


@pytest.mark.slow
@pytest.mark.parametrize("name", functions(Right))
def test_a_loss_that_may_raise_is_proved(name):
    found = answer_for(functions(Right)[name], PARAMS, BATCH)
    assert found.says == "proved", found


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", functions(Wrong))
def test_a_wrong_loss_that_may_raise_is_not(name):
    fn = functions(Wrong)[name]
    found = answer_for(fn, PARAMS, BATCH)
    assert found.says == "unknown" and fn.__doc__ in found.why, found


@pytest.mark.slow
def test_padding_may_not_raise():
    losses = functions(Right)
    padded = answer_for(losses["of_examples"], PARAMS, BATCH, padded=True)
    assert padded.says == "proved", padded
    padded = answer_for(losses["of_rows"], PARAMS, BATCH, padded=True)
    assert "padding counts in" in padded.why, padded


@pytest.mark.slow
@pytest.mark.parametrize("name", functions(Right))
def test_a_step_that_may_raise_is_proved_and_raises(name):
    def loss_fn(params, b, t):
        found = functions(Right)[name](params, b, t)
        return tj.Weighted(found.value.sum(), t.weight.sum())

    steps = [
        tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=n))
        for n in (1, 4)
    ]
    one, four = [step(step.init(PARAMS), BATCH)[0] for step in steps]
    np.testing.assert_allclose(four.params["w"], one.params["w"], rtol=1e-5)
    assert steps[1].unproved == {}
    if name != "of_parameters":
        large = {**BATCH, "x": BATCH["x"] + 10 * (np.arange(48)[:, None] == 40)}
        with pytest.raises(Exception, match="large"):
            jax.block_until_ready(steps[0](one, large))  # others would wait
