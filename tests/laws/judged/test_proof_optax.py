"""Every transformation of optax, found by looking, is proved for several towers.

Those that have, between them, every operation of all others train, as by plain optax.
"""

import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkout import ROOT
from optax import contrib

import towerjax as tj

SGD = optax.sgd(0.1)
MASK = {"w": True, "b": False}


def half(params):
    return 0.5 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


def every_other(step, *args, **kwargs):
    return step % 2 == 0


NOISE = dict(l2_norm_clip=1.0, noise_multiplier=0.1)
PARTS = dict(transforms={True: SGD, False: optax.adam(0.1)}, param_labels=MASK)
# What those that need arguments are given. A callable is called with the function.
ARGUMENTS = {
    "add_noise": dict(eta=0.1, gamma=0.5, key=0),
    "adaptive_grad_clip": dict(clipping=0.1),
    "apply_if_finite": dict(inner=SGD, max_consecutive_errors=2),
    "chain": lambda f: f(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "conditionally_mask": dict(inner=SGD, should_transform_fn=every_other),
    "conditionally_transform": dict(inner=SGD, should_transform_fn=every_other),
    "differentially_private_aggregate": NOISE | dict(key=0),
    "dpsgd": NOISE | dict(learning_rate=0.1, seed=0),
    "flatten": dict(inner=SGD),
    "freeze": dict(mask=MASK),
    "inject_hyperparams": lambda f: f(optax.adam)(learning_rate=0.1),
    "inject_stateful_hyperparams": lambda f: f(optax.adam)(learning_rate=0.1),
    "lookahead": lambda f: NotImplemented,  # its parameters are pairs
    "masked": dict(inner=SGD, mask=MASK),
    "measure_with_ema": dict(measure=lambda updates: updates, decay=0.9),
    "mechanize": dict(base_optimizer=SGD),
    "multi_transform": PARTS,
    "named_chain": lambda f: f(("clip", optax.clip(1.0)), ("sgd", SGD)),
    "partition": PARTS,
    "noisy_sgd": dict(learning_rate=0.1, key=0),
    "sam": dict(optimizer=SGD, adv_optimizer=optax.sgd(0.05)),
    "scale_by_backtracking_linesearch": dict(max_backtracking_steps=3),
    "scale_by_muon": dict(
        weight_dimension_numbers={"w": contrib.MuonDimensionNumbers()}
    ),
    "scale_by_schedule": dict(step_size_fn=optax.cosine_decay_schedule(0.1, 10)),
    "scale_by_zoom_linesearch": dict(max_linesearch_steps=3),
    "schedule_free": dict(base_optimizer=SGD, learning_rate=0.1),
    "selective_transform": dict(optimizer=SGD, freeze_mask=MASK),
    "snapshot": dict(measure_name="norm", measure=half),
    "split_real_and_imaginary": dict(inner=SGD),
    "stateless": dict(f=lambda updates, params: updates),
    "stateless_with_tree_map": dict(f=lambda g, p: 0.1 * g),
    "with_extra_args_support": dict(tx=SGD),
}
# Each takes the gradients of single examples, and is refused.
OF_EXAMPLES = {"differentially_private_aggregate", "dpsgd"}
# What some ask for and a step has not got; sam takes not even the loss.
SEARCHES = {"lbfgs", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch"}
ASKED = dict.fromkeys(SEARCHES, ("value", "grad", "value_fn"))
ASKED |= dict.fromkeys(("sophia", "hutchinson_estimator_diag_hessian"), ("obj_fn",))
ASKED |= {"sam": ()}


def factories():
    """Each public function of optax that makes a transformation, by name."""
    for module in (optax, contrib):
        for name in sorted(vars(module)):
            function = getattr(module, name)
            if name[0] == "_" or not inspect.isfunction(function):
                continue
            made = str(inspect.signature(function).return_annotation)
            if "GradientTransformation" in made and "Callable" not in made[:40]:
                yield name, function
            elif name in ARGUMENTS:
                yield name, function


FACTORIES = dict(factories())


def made(name):
    function = FACTORIES[name]
    given = ARGUMENTS.get(name)
    if given is None:
        every = inspect.signature(function).parameters.values()
        needed = [p for p in every if p.default is p.empty and p.kind < p.VAR_KEYWORD]
        # A rate, a decay, a bound: optax's arguments without defaults are numbers.
        given = dict.fromkeys([p.name for p in needed], 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are deprecated
        return given(function) if callable(given) else function(**given)


def with_what_it_asks_for(name, optimizer):
    """The optimizer, given what some ask for and a step has not got."""
    inner = optax.with_extra_args_support(optimizer)

    def update(updates, state, params, *, value, **extra):
        known = dict(value=value, grad=updates, value_fn=half, obj_fn=half)
        asked = {x: known[x] for x in ASKED.get(name, ("value",))} | extra
        return inner.update(updates, state, params, **asked)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params["w"] + params.get("b", jnp.zeros(3))[None] - batch["y"]
    return tj.Weighted.mean(jnp.sum(errors**2, axis=1), tower.weight)


PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
BATCH = {"x": jnp.ones((8, 2)), "y": jnp.zeros((8, 3))}


def test_the_catalogue_is_as_long_as_it_was():
    assert len(FACTORIES) >= 115
    assert set(FACTORIES) >= set(ARGUMENTS)


# What no step has, and what the refusal says to write.
REFUSED = {
    "lbfgs": "value_fn.*update of your own step",
    "scale_by_backtracking_linesearch": "value_fn.*around step.fn",
    "scale_by_zoom_linesearch": "value_fn.*around step.fn",
    "sophia": "obj_fn must be provided",
    "differentially_private_aggregate": "of each example.*step of your own",
    "dpsgd": "of each example.*step of your own",
    "lookahead": "no attribute 'fast'.*optimizers.md",
}
ROWS = np.random.default_rng(0)
DISTINCT = {
    "x": ROWS.normal(size=(8, 2)).astype(np.float32),
    "y": ROWS.normal(size=(8, 3)).astype(np.float32),
}
STEPS = 3
# It divides by what an SVD leaves of a gradient.
RTOL = {"scale_by_galore": 1e-4}


def mean_loss(params):
    errors = DISTINCT["x"] @ params["w"] + params.get("b", jnp.zeros(3))[None]
    return jnp.mean(jnp.sum((errors - DISTINCT["y"]) ** 2, axis=1))


mean_loss_and_grads = jax.value_and_grad(mean_loss)


def by_plain_optax(name, optimizer, params):
    """Three steps by hand; only sam does not take the loss."""
    optimizer = optax.with_extra_args_support(optimizer)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        value, grads = mean_loss_and_grads(params)
        extra = {} if name == "sam" else {"value": value}
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def by_step(optimizer, params, num_towers, loss=loss_fn):
    step = tj.build_train_step(loss, optimizer, tj.Mirrored(towers=num_towers))
    state = step.init(params)
    for _ in range(STEPS):
        state, _ = step(state, DISTINCT)
    return state.params


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_more_is_refused(name):
    optimizer = made(name) if name != "lookahead" else lookahead()
    step = tj.build_train_step(loss_fn, optimizer, tj.Mirrored(towers=4))
    with pytest.raises(ValueError, match=REFUSED[name]):
        step.check(PARAMS, DISTINCT)


def lookahead():
    return optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)


def side_by_side(optimizers, takes_no_loss=("sam",)):
    """One optimizer of trees by name, each updated by its own."""
    inner = {x: optax.with_extra_args_support(o) for x, o in optimizers.items()}

    def update(updates, state, params, *, value):
        found = {}
        for x, optimizer in inner.items():
            extra = {} if x in takes_no_loss else {"value": value}
            found[x] = optimizer.update(updates[x], state[x], params[x], **extra)
        return [{x: both[i] for x, both in found.items()} for i in (0, 1)]

    return optax.GradientTransformationExtraArgs(
        lambda params: {x: o.init(params[x]) for x, o in inner.items()}, update
    )


def params_of(name):
    """A matrix; and a bias, where an argument tells them apart."""
    given = ARGUMENTS.get(name)
    both = isinstance(given, dict) and MASK in given.values()
    return PARAMS if both else {"w": PARAMS["w"]}


def losses(params, batch, tower):
    return sum(loss_fn(own, batch, tower).sum for own in params.values())


def mean_of_losses(params, batch, tower):
    return tj.Weighted(losses(params, batch, tower), tower.weight.sum())


@pytest.mark.slow
def test_every_transformation_of_optax_is_let_pass():
    """In one step; those that ask for more than a step has are given it."""
    names = [x for x in FACTORIES if x not in {*OF_EXAMPLES, "lookahead"}]
    asking = {x: with_what_it_asks_for(x, made(x)) for x in names}
    params = {name: params_of(name) for name in names}
    optimizer = side_by_side(asking, takes_no_loss=())
    step = tj.build_train_step(mean_of_losses, optimizer, tj.Mirrored(towers=4))
    with jax.numpy_rank_promotion("allow"):
        proof = step.check(params, BATCH)
    assert set(proof.analysis.outputs) == {None}
    assert proof.analysis.hangs == ()


TAKEN = [name for name in FACTORIES if name not in REFUSED]


def operations(name):
    """Each that its update has, with the dtype it gives; and its state's dtypes."""
    optimizer = made(name)
    extra = {} if name == "sam" else {"value": jnp.float32(1)}
    optimizer = optax.with_extra_args_support(optimizer)
    params = params_of(name)

    def begun(params):
        return params, optimizer.init(params)

    def update(params, state):
        return optimizer.update(params, state, params, **extra)

    state = jax.eval_shape(begun, params)
    text = str(jax.make_jaxpr(update)(*state))
    held = {("held", str(x.dtype)) for x in jax.tree.leaves(state)}
    return held | set(re.findall(r":(\w+)\[\S*\] = (\w+)", text))


def few_with_all_operations():
    """Transformations that have, between them, all that any has."""
    left = {name: operations(name) for name in TAKEN}
    while any(left.values()):
        most = max(left, key=lambda name: len(left[name]))
        yield most
        found = left[most]
        left = {name: rest - found for name, rest in left.items()}


@pytest.mark.slow
def test_transformations_of_optax_train_as_with_plain_optax():
    """In one program: each has parameters of its own, and all are updated at once."""
    with jax.numpy_rank_promotion("allow"):
        names = [*few_with_all_operations()]
    assert len(names) > 10
    params = {name: params_of(name) for name in names}

    def total(params):
        return sum(mean_loss(own) for own in params.values())

    @jax.jit
    def by_hand(params, state):
        value, grads = jax.value_and_grad(total)(params)
        updates, state = optimizer.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    with jax.numpy_rank_promotion("allow"):
        optimizer = side_by_side({name: made(name) for name in names})
        expected = params
        state = optimizer.init(params)
        for _ in range(STEPS):
            expected, state = by_hand(expected, state)
        optimizer = side_by_side({name: made(name) for name in names})
        got = by_step(optimizer, params, 4, mean_of_losses)
    for name in names:
        for key, want in expected[name].items():
            np.testing.assert_allclose(
                got[name][key], want, RTOL.get(name, 2e-5), err_msg=name
            )


WRAPPED = {
    "chain": lambda inner: optax.chain(optax.clip(1.0), inner),
    "masked": lambda inner: optax.masked(inner, MASK),
    "partition": lambda inner: optax.partition({True: inner, False: SGD}, MASK),
    "inject": lambda inner: optax.inject_hyperparams(
        lambda rate: optax.chain(inner, optax.scale(rate))
    )(rate=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("name", ["sam", "reduce_on_plateau", "dpsgd"])
def test_what_is_inside_others_gets_what_it_takes(wrapper, name):
    def optimizer():
        inner = made(name)
        if name == "reduce_on_plateau":
            inner = optax.chain(SGD, inner)
        return WRAPPED[wrapper](inner)

    step = tj.build_train_step(loss_fn, optimizer(), tj.Mirrored(towers=2))
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            step.check(PARAMS, DISTINCT)
        return
    step.check(PARAMS, DISTINCT)  # what lacks an argument, or has one more, has failed
    if wrapper != "inject":
        return
    expected = by_plain_optax(name, optimizer(), PARAMS)
    got = by_step(optimizer(), PARAMS, 2)
    for key in PARAMS:
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_multi_steps_hand_the_loss_on():
    def optimizer():
        plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
        return optax.MultiSteps(optax.chain(SGD, plateau), 2)

    plain = optax.GradientTransformationExtraArgs(optimizer().init, optimizer().update)
    expected = by_plain_optax("multi_steps", plain, PARAMS)
    got = by_step(optimizer(), PARAMS, 2)
    np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-6)


@pytest.mark.slow
def test_lookahead_trains_as_the_page_says():
    pair = lookahead()
    optimizer = optax.GradientTransformation(
        pair.init, lambda grads, state, params: pair.update(grads.fast, state, params)
    )

    def loss(params, batch, tower):
        return loss_fn(params.fast, batch, tower)

    params = optax.LookaheadParams.init_synced(PARAMS)
    got = by_step(optimizer, params, 4, loss)
    state = pair.init(params)
    for _ in range(STEPS):
        _, grads = jax.jit(mean_loss_and_grads)(params.fast)
        updates, state = pair.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    for part in ("fast", "slow"):
        expected = getattr(params, part)["w"]
        np.testing.assert_allclose(getattr(got, part)["w"], expected, rtol=1e-6)


# The table in docs/optimizers.md

PAGE = ROOT / "docs" / "optimizers.md"


def takes_the_loss(name, params):
    """Does its update ask for ``value``?"""
    optimizer = made(name)
    try:
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
    except TypeError as error:
        assert "'value'" in str(error), error
        return True
    return False


@pytest.mark.slow
def test_the_table_of_optimizers_has_those_that_get_more_or_are_refused():
    """The tests above show of each whether it is refused."""
    rows = re.findall(r"^\| `optax\.(\S+)` \| (\w+)(.*?) \|", PAGE.read_text(), re.M)
    page = {(name, word): rest for name, word, rest in rows}
    named = {x: f"{'contrib.' * hasattr(contrib, x)}{x}" for x in FACTORIES}
    assert {x for x, word in page if word == "refused"} == {named[x] for x in REFUSED}
    with jax.numpy_rank_promotion("allow"):
        losses = {named[x] for x in TAKEN if takes_the_loss(x, params_of(x))}
    assert {x for (x, _), rest in page.items() if rest == ", loss"} == losses


def test_updates_of_another_shape_are_refused():
    sums = optax.stateless(lambda grads, _: jax.tree.map(lambda g: g.sum(0), grads))
    step = tj.build_train_step(loss_fn, sums, tj.Mirrored(towers=2))
    text = r"params\['w'\] is float32\[3\], expected float32\[2, 3\]"
    with pytest.raises(ValueError, match=text):
        step.check({"w": PARAMS["w"]}, DISTINCT)
