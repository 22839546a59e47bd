"""Every transformation of optax, found by looking, trains on several towers."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import towerjax as tj

SGD = optax.sgd(0.1)
MASK = {"w": True, "b": False}


def half(params):
    return 0.5 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


def every_other(step, *args, **kwargs):
    return step % 2 == 0


# What those that need arguments are given. A callable is called with the function.
ARGUMENTS = {
    "add_noise": dict(eta=0.1, gamma=0.5, key=0),
    "adaptive_grad_clip": dict(clipping=0.1),
    "apply_if_finite": dict(inner=SGD, max_consecutive_errors=2),
    "chain": lambda f: f(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "conditionally_mask": dict(inner=SGD, should_transform_fn=every_other),
    "conditionally_transform": dict(inner=SGD, should_transform_fn=every_other),
    "differentially_private_aggregate": dict(
        l2_norm_clip=1.0, noise_multiplier=0.1, key=0
    ),
    "dpsgd": dict(learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=0.1, seed=0),
    "flatten": dict(inner=SGD),
    "freeze": dict(mask=MASK),
    "inject_hyperparams": lambda f: f(optax.adam)(learning_rate=0.1),
    "inject_stateful_hyperparams": lambda f: f(optax.adam)(learning_rate=0.1),
    "lookahead": lambda f: NotImplemented,  # its parameters are pairs
    "masked": dict(inner=SGD, mask=MASK),
    "measure_with_ema": dict(measure=lambda updates: updates, decay=0.9),
    "mechanize": dict(base_optimizer=SGD),
    "multi_transform": dict(
        transforms={True: SGD, False: optax.adam(0.1)}, param_labels=MASK
    ),
    "named_chain": lambda f: f(("clip", optax.clip(1.0)), ("sgd", SGD)),
    "partition": dict(
        transforms={True: SGD, False: optax.adam(0.1)}, param_labels=MASK
    ),
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
# Each takes the gradients of single examples.
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
    function, given = FACTORIES[name], ARGUMENTS.get(name)
    if given is None:
        needed = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        # A rate, a decay, a bound: optax's arguments without defaults are numbers.
        given = dict.fromkeys(needed, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are deprecated
        return given(function) if callable(given) else function(**given)


def with_what_it_asks_for(name, optimizer):
    """The optimizer, given what some ask for and a step has not got."""
    inner = optax.with_extra_args_support(optimizer)

    def update(updates, state, params, *, value, **extra):
        known = dict(value=value, grad=updates, value_fn=half, obj_fn=half)
        asked = {x: known[x] for x in ASKED.get(name, ("value",))} | extra
        if name in OF_EXAMPLES:
            updates = jax.tree.map(lambda g: g[None], updates)
        updates, state = inner.update(updates, state, params, **asked)
        return updates, state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params["w"] + params.get("b", jnp.zeros(3))[None] - batch["y"]
    return tj.Weighted.mean(jnp.sum(errors**2, axis=1), tower.weight)


PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
BATCH = {"x": jnp.ones((8, 2)), "y": jnp.zeros((8, 3))}


def step_of(name, num_towers):
    optimizer = made(name)
    if optimizer is NotImplemented:
        return None
    optimizer = with_what_it_asks_for(name, optimizer)
    return tj.build_train_step(loss_fn, optimizer, tj.Mirrored(towers=num_towers))


def test_the_catalogue_is_as_long_as_it_was():
    assert len(FACTORIES) >= 115
    assert set(FACTORIES) >= set(ARGUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORIES)
def test_every_transformation_of_optax_is_let_pass(name):
    step = step_of(name, 4)
    if step is None:
        return
    params = {"w": PARAMS["w"]} if name == "scale_by_muon" else PARAMS  # matrices
    with jax.numpy_rank_promotion("allow"):
        proof = step.check(params, BATCH)
    assert set(proof.analysis.outputs) == {None}
    assert proof.analysis.repeats == () and proof.analysis.hangs == ()


FAST = "adam lamb lars adafactor lbfgs muon schedule_free sam apply_if_finite".split()


@pytest.mark.parametrize("name", FAST)
def test_some_transformations_of_optax_are_let_pass(name):
    assert step_of(name, 4).check(PARAMS, BATCH).analysis.repeats == ()
