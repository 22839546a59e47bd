"""Programs that change their state in place, or run in Python, on several devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import towerjax as tj

P = PartitionSpec
DRAW = np.random.default_rng(5)
W = DRAW.normal(size=3).astype(np.float32)
X = DRAW.normal(size=(16, 3)).astype(np.float32)
Y = DRAW.normal(size=16).astype(np.float32)


def loss(w, x, y):
    return ((x @ w - y) ** 2).mean()


def gradient_of(devices, factor):
    """The mean of devices' gradients, times a factor of their number."""

    def own(w, x, y):
        return lax.pmean(jax.grad(loss)(w, x, y), "i") * factor(len(devices))

    specs = {"in_specs": (P(), P("i"), P("i")), "out_specs": P(), "check_vma": False}
    return jax.jit(jax.shard_map(own, mesh=Mesh(devices, "i"), **specs))


def right(_):
    return 1.0


def wrong(devices):
    return devices / 2 + 0.5


class Trainer:
    """State in attributes, as of many trainers."""

    def __init__(self, gradient):
        self.params = {"w": jnp.array(W)}
        self.gradient = gradient
        self.calls = 0

    def step(self, x, y):
        self.params["w"] -= 0.1 * self.gradient(self.params["w"], x, y)
        self.calls += 1
        return jnp.float32(self.calls)


def of_object(devices, factor):
    trainer = Trainer(gradient_of(devices, factor))
    return lambda trainer, x, y: trainer.step(x, y), (trainer, X, Y)


def of_method(devices, factor):
    return Trainer(gradient_of(devices, factor)).step, (X, Y)


def of_closure(devices, factor):
    w = jnp.array(W)
    gradient = gradient_of(devices, factor)

    def step(x, y):
        nonlocal w
        w = w - 0.1 * gradient(w, x, y)
        return jnp.sum(x)

    return step, (X, Y)


def of_ref(devices, factor):
    gradient = gradient_of(devices, factor)

    def step(ref, x, y):
        ref[...] -= 0.1 * gradient(ref[...], x, y)
        return 0.0

    whole = NamedSharding(Mesh(devices, "i"), P())
    return step, (jax.new_ref(jax.device_put(W, whole)), X, Y)


def of_numpy(devices, factor):
    gradient = gradient_of(devices, factor)

    def step(w, x, y):
        new = gradient(w, x, y)
        w -= 0.1 * np.asarray(new)
        return new.sum()

    return step, (W.copy(), X, Y)


def of_nnx(devices, factor):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    tx = optax.adam(0.1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    rows = NamedSharding(Mesh(devices, "i"), P("i"))
    data = [jax.device_put(a, rows) for a in (X, Y)]

    @nnx.jit
    def step(model, optimizer, x, y):
        def of(model):
            return ((model(x)[:, 0] - y) ** 2).mean() * factor(len(devices))

        value, grads = nnx.value_and_grad(of)(model)
        optimizer.update(model, grads)
        return value / factor(len(devices))

    return step, (model, optimizer, *data)


def of_nnx_closure(devices, factor):
    step, (model, optimizer, *data) = of_nnx(devices, factor)
    return lambda x, y: step(model, optimizer, x, y), data


IN_PLACE = {
    of_object: "args[0].params['w']",
    of_method: "fn.self.params['w']",
    of_closure: "fn.w",
    of_ref: "args[0]",
    of_numpy: "args[0]",
    of_nnx: "args[0].kernel.value",
    of_nnx_closure: "fn.model.kernel.value",
}


@pytest.mark.slow
@pytest.mark.parametrize("factor", [right, wrong])
@pytest.mark.parametrize("make", IN_PLACE, ids=lambda x: x.__name__)
def test_what_is_proved_of_it_is_right(make, factor):
    """All that is followed is proved where it is right; nothing else ever is."""
    is_followed = make is of_nnx
    try:
        report = tj.testing.prove(
            functools.partial(make, factor=factor), devices=(1, 2)
        )
    except ValueError as error:
        assert "cannot be traced" in str(error)
        return
    if is_followed and factor is right:
        assert IN_PLACE[make] in [x.leaf for x in report.equal]
        assert not report.unproved
    elif is_followed:
        assert IN_PLACE[make] in report.unproved
    else:
        assert "result" in report.unproved


@pytest.mark.slow
@pytest.mark.parametrize("make", IN_PLACE, ids=lambda x: x.__name__)
def test_what_a_program_changes_in_place_is_compared(make):
    report = tj.testing.same_on_devices(functools.partial(make, factor=right), (1, 2))
    assert IN_PLACE[make] in report.compared and report.splits == 3
    assert not any("scalars" in note for note in report.notes)
    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_on_devices(functools.partial(make, factor=wrong), (1, 2))
    leaves = [x.leaf for x in error.value.findings]
    hidden = make in (of_nnx, of_nnx_closure)  # by Adam, but in its state
    assert IN_PLACE[make] in leaves or (hidden and any("mu" in x for x in leaves))


# Programs that no trace takes, or whose leaves are no arrays.


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w", "act"], meta_fields=[]
)
@dataclasses.dataclass
class Module:  # as of Equinox, whose functions are leaves
    w: jax.Array
    act: object


def of_module(devices, factor):
    gradient = gradient_of(devices, factor)

    def step(module, x, y):
        return Module(module.w - 0.1 * gradient(module.w, x, y), module.act)

    return step, (Module(jnp.array(W), jnp.tanh), X, Y)


def of_set_mesh(devices, factor):
    mesh = Mesh(devices, "i")

    def step(w, x, y):
        with jax.set_mesh(mesh):
            x, y = (jax.device_put(a, NamedSharding(mesh, P("i"))) for a in (x, y))
            return jax.jit(jax.grad(loss))(w, x, y) * factor(len(devices))

    return step, (W, X, Y)


def of_python(devices, factor):
    gradient = gradient_of(devices, factor)

    def train(w, batches):
        history = []
        for x, y in batches:
            w = w - 0.01 * gradient(w, x, y)
            history.append(float(w.sum()))
        return w, history

    return train, (W, iter([(X, Y)] * 2))


def of_step(devices, factor):
    def loss_fn(w, batch, tower):
        errors = (batch["x"] @ w - batch["y"]) ** 2
        return tj.Weighted.mean(errors * factor(len(devices)), tower.weight)

    strategy = tj.Mirrored(devices=devices, towers=len(devices))
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    return step, (step.init(W), {"x": X, "y": Y})


UNTRACED = {of_module: 0, of_set_mesh: 1, of_python: 1, of_step: 1}


@pytest.mark.slow
@pytest.mark.parametrize("make", UNTRACED, ids=lambda x: x.__name__)
def test_what_cannot_be_traced_is_run_and_said(make):
    report = tj.testing.same_on_devices(functools.partial(make, factor=right), (1, 2))
    told = [x for x in report.notes if "cannot be traced" in x]
    assert len(told) == UNTRACED[make]
    with pytest.raises(tj.testing.SplitError):
        tj.testing.same_on_devices(functools.partial(make, factor=wrong), (1, 2))


@pytest.mark.slow
def test_leaves_that_are_no_numbers_are_told_and_proved():
    make = functools.partial(of_module, factor=right)
    report = tj.testing.same_on_devices(make, (1, 2))
    assert report.compared == ("result.w",) and report.not_compared == ("result.act",)
    fn, args = make(jax.devices()[:2])
    assert tj.testing.prove(fn, *args).same == 1


def of_adam(devices, returned, factor):
    """Adam's first update is of one size, whatever its gradient's is."""
    gradient = gradient_of(devices, right)
    tx = optax.adam(0.1)

    def step(w, x, y):
        grads = gradient(w, x, y)
        grads = grads * jnp.where(w[0] == W[0], factor(len(devices)), 1.0)
        return grads, tx.init(w)

    def update(state, x, y):
        w, opt_state = state
        updates, opt_state = tx.update(step(w, x, y)[0], opt_state)
        return w + updates, opt_state

    if returned == "state":
        return update, ((W, tx.init(W)), X, Y)
    if returned == "loss":
        return lambda w, x, y: loss(update((w, tx.init(w)), x, y)[0], x, y), (W, X, Y)
    return lambda s, x, y: {"new": update(s, x, y)[0]}, ((W, tx.init(W)), X, Y)


@pytest.mark.slow
@pytest.mark.parametrize(("returned", "calls", "text"), [
    ("state", 3, None), ("loss", 1, "only scalars"), ("new", 1, "one call"),
])  # fmt: skip
def test_three_calls_are_compared_or_it_is_said(returned, calls, text):
    make = functools.partial(of_adam, returned=returned)
    report = tj.testing.same_on_devices(functools.partial(make, factor=right), (1, 2))
    assert report.splits == calls
    assert [text in note for note in report.notes] == [True] * (text is not None)
    make = functools.partial(make, factor=wrong)
    if returned == "state":
        with pytest.raises(tj.testing.SplitError, match="2 devices"):
            tj.testing.same_on_devices(make, (1, 2))
    else:  # which nobody sees
        assert tj.testing.same_on_devices(make, (1, 2)).notes == report.notes


@pytest.mark.slow
def test_a_later_call_may_depend_on_the_devices():
    def make(devices):
        gradient = gradient_of(devices, right)

        def step(state, x, y):
            w, count = state
            scale = jnp.where(count == 2, len(devices), 1.0)
            return w - 0.1 * scale * gradient(w, x, y), count + 1

        return step, ((W, jnp.zeros(())), X, Y)

    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_on_devices(make, (1, 2))
    [finding] = error.value.findings
    assert finding.leaf == "result[0]" and finding.split == "call 3"


@pytest.mark.slow
def test_what_changes_only_later_is_compared_then():
    class Late(Trainer):
        def step(self, x, y):
            super().step(x, y)
            if self.calls == 2:
                self.late = jnp.float32(self.number)
            return np.array(["text"])

    def make(devices):
        trainer = Late(gradient_of(devices, right))
        trainer.number = len(devices)
        return trainer.step, (X, Y)

    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_on_devices(make, (1, 2))
    assert [(x.leaf, x.split) for x in error.value.findings] == [
        ("fn.self.late", "call 2")
    ]


@pytest.mark.slow
def test_a_program_is_made_once_for_each_number_of_devices():
    made = []

    def make(devices, factor=right):
        made.append(len(devices))
        fn = jax.jit(gradient_of(devices, factor), donate_argnums=0)
        return lambda w, x, y: fn(jnp.asarray(w), x, y), (jnp.array(W), X, Y)

    tj.testing.same_on_devices(make)
    assert made == [1, 2, 4]
    with pytest.raises(tj.testing.SplitError):  # of which one device runs four times
        tj.testing.same_on_devices(functools.partial(make, factor=wrong))
    assert made == [1, 2, 4] * 2
    with pytest.raises(ValueError, match="nothing to compare"):
        rows = lambda devices: NamedSharding(Mesh(devices, "i"), P("i"))  # noqa: E731
        tj.testing.same_on_devices(
            lambda devices: (lambda x: "text", [jax.device_put(X, rows(devices))])
        )


@pytest.mark.slow
def test_a_generator_that_make_has_seeded_is_seeded_for_each_run():
    def make(devices):
        draw = np.random.default_rng(0)
        gradient = gradient_of(devices, wrong)
        return lambda x, y: gradient(W, x * draw.uniform(), y), (X, Y)

    with pytest.raises(tj.testing.SplitError):  # and not that it is not deterministic
        tj.testing.same_on_devices(make, (1, 2))


@pytest.mark.slow
def test_a_result_of_another_dtype_is_no_state():
    def make(devices):
        rows = NamedSharding(Mesh(devices, "i"), P("i"))

        def fn(x):
            assert x.dtype == jnp.bfloat16
            return x.astype(jnp.float32) * 2

        return fn, [jax.device_put(X.astype(jnp.bfloat16), rows)]

    assert tj.testing.same_on_devices(make, (1, 2)).splits == 1


@pytest.mark.slow
def test_what_cannot_be_traced_may_compute_in_16_bits():
    def make(devices):
        fn = gradient_of(devices, lambda number: 1 + 0.01 * (number - 1))

        def step(w, x, y):
            gradient = fn(w, x, y)
            return {"gradient": gradient, "first": float(gradient[0])}

        return step, (W, X, Y)

    with pytest.raises(tj.testing.SplitError, match="in 16 bits, write rtol=0.06"):
        tj.testing.same_on_devices(make, (1, 2))
    assert tj.testing.same_on_devices(make, (1, 2), rtol=0.06).largest > 0.005
