"""Published wrong numbers of a second axis: right for whole arrays, refused by hand.

The table of docs/how_to/tensor_and_expert_parallel.md has a line for each.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkout import ROOT
from jax import lax
from jax.sharding import PartitionSpec as P

import towerjax as tj

WORDS = 16
LIMIT = 0.05
RATE = 0.1
COLUMNS = P(None, "model")
TOKENS = P(None, "model")
WHOLE = P()
SPECS = {"w": COLUMNS, "experts": P("model"), "scale": WHOLE, "router": WHOLE}


def start():
    rng = np.random.default_rng(0)
    shapes = {"w": (8, WORDS), "experts": (4, 8, 8), "scale": (8,), "router": (8, 4)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def rows():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(8, 4, 8))
    labels = rng.integers(WORDS, size=(8, 4))
    later = rng.random((8, 4)) < 0.3  # which tokens count for a second prediction
    return {"x": x, "labels": labels, "counts": rng.random((8, 4)) < 0.7} | {
        "later": later.astype(float)
    }


def by_hand(fn, ins, outs, *args):
    specs = {"in_specs": ins, "out_specs": outs, "check_vma": False}
    return jax.shard_map(fn, axis_names={"model"}, **specs)(*args)


def scaled(params, batch):
    return batch["x"] * params["scale"][None, None]


def entropy(logits, labels, smooth=0.0):
    of_label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (
        jax.nn.logsumexp(logits, axis=-1)
        - (1 - smooth) * of_label
        - smooth * logits.mean(-1)
    )


def own_entropy(logits, labels, mean=None):
    """By a device with some words: smoothed, if it has their mean logit."""
    count = logits.shape[-1]
    most = lax.pmax(lax.stop_gradient(logits.max(-1)), "model")
    own = labels - lax.axis_index("model") * count
    inside = (own >= 0) & (own < count)
    of_label = jnp.take_along_axis(logits, jnp.where(inside, own, 0)[..., None], -1)
    of_label = lax.psum(jnp.where(inside, of_label[..., 0], 0), "model")
    sums = lax.psum(jnp.exp(logits - most[..., None]).sum(-1), "model")
    smooth = 0.0 if mean is None else 0.1
    mean = 0.0 if mean is None else mean
    return most + jnp.log(sums) - (1 - smooth) * of_label - smooth * mean


def smoothed(params, batch):
    return entropy(scaled(params, batch) @ params["w"], batch["labels"], 0.1)


def smoothed_by_own_words(params, batch):
    def fn(w, x, labels):
        logits = x @ w
        return own_entropy(logits, labels, logits.mean(-1))  # of a device's own words

    args = params["w"], scaled(params, batch), batch["labels"]
    return by_hand(fn, (COLUMNS, WHOLE, WHOLE), WHOLE, *args)


def plain(params, batch):
    return entropy(scaled(params, batch) @ params["w"], batch["labels"])


def gathered_and_added(params, batch):
    def fn(w, x, labels):
        logits = lax.all_gather(x @ w, "model", axis=-1, tiled=True)
        sums = lax.psum(jnp.exp(logits).sum(-1), "model")  # of all words, each time
        of_label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.log(sums) - of_label

    args = params["w"], scaled(params, batch), batch["labels"]
    return by_hand(fn, (COLUMNS, WHOLE, WHOLE), WHOLE, *args)


def by_own_counts(params, batch):
    def fn(losses, counts):
        own = (losses * counts).sum() / jnp.maximum(counts.sum(), 1)
        return lax.pmean(own, "model")

    losses = plain(params, batch)
    mean = by_hand(fn, (TOKENS, TOKENS), WHOLE, losses, batch["later"])
    return jnp.broadcast_to(mean, losses.shape)


def gathered_over_another_axis(params, batch):
    def fn(x):
        return lax.all_gather(x, "other", axis=1, tiled=True)[:, :4]

    specs = {"in_specs": TOKENS, "out_specs": WHOLE, "check_vma": False}
    names = {"model", "other"}
    x = jax.shard_map(fn, axis_names=names, **specs)(scaled(params, batch))
    return entropy(x @ params["w"], batch["labels"])


def mixed(params, batch):
    gates = jax.nn.softmax(batch["x"] @ params["router"])
    out = jnp.einsum("bte,etbd->btd", gates, each_expert(params["experts"], batch))
    return (out**2).mean(-1)


def each_expert(experts, batch):
    return jnp.einsum("btd,edf->etbf", batch["x"], experts)


@jax.custom_vjp
def mixed_by_hand(params, batch):
    return mixed(params, batch)


def _more_of_experts(kept, cotangent):
    grads = jax.vjp(lambda params: mixed(params, kept[1]), kept[0])[1](cotangent)[0]
    part = P("model")

    def fn(x):
        return x * lax.axis_size("model")

    return {**grads, "experts": by_hand(fn, part, part, grads["experts"])}, None


mixed_by_hand.defvjp(lambda *args: (mixed(*args), args), _more_of_experts)


@jax.custom_vjp
def of_shared_scale(w, scale, x):
    def fn(w, scale, x):
        return lax.psum((((x * scale[None, None]) @ w) ** 2).sum(-1), "model")

    return by_hand(fn, (COLUMNS, WHOLE, WHOLE), WHOLE, w, scale, x)


def _own_part(kept, cotangent):
    def fn(w, scale, x, cotangent):
        own = lambda w, scale: (((x * scale[None, None]) @ w) ** 2).sum(-1)  # noqa: E731
        return jax.vjp(own, w, scale)[1](cotangent)  # of a device's own columns

    ins = COLUMNS, WHOLE, WHOLE, WHOLE
    grads = by_hand(fn, ins, (COLUMNS, WHOLE), *kept, cotangent)
    return (*grads, jnp.zeros_like(kept[2]))


of_shared_scale.defvjp(lambda *args: (of_shared_scale(*args), args), _own_part)


def squared(params, batch):
    return ((scaled(params, batch) @ params["w"]) ** 2).sum(-1)


def squared_by_hand(params, batch):
    return of_shared_scale(params["w"], params["scale"], batch["x"])


def next_labels(params, batch):
    later = jnp.roll(batch["labels"], -1, 1)
    return entropy(scaled(params, batch) @ params["w"], later)


def next_labels_of_own_tokens(params, batch):
    roll = lambda labels: jnp.roll(labels, -1, 1)  # noqa: E731
    later = by_hand(roll, TOKENS, TOKENS, batch["labels"])
    return entropy(scaled(params, batch) @ params["w"], later)


def divided_by_devices(params, batch):
    losses = plain(params, batch)
    return by_hand(lambda x: x / lax.axis_size("model"), WHOLE, WHOLE, losses)


PROOF = tj.ReplicationError
AUDIT = tj.testing.SplitError
# By the thread and its number of a finding: for whole arrays, by hand, and who says so.
CASES = {
    "#7452, 1": (smoothed, smoothed_by_own_words, PROOF),
    "#7452, 2": (plain, gathered_and_added, AUDIT),
    "#7452, 3": (plain, by_own_counts, AUDIT),
    "#7452, 4, 6, 7": (plain, gathered_over_another_axis, PROOF),
    "#7452, 11": (squared, squared_by_hand, PROOF),
    "#3959": (plain, divided_by_devices, AUDIT),
    "verl#4250": (next_labels, next_labels_of_own_tokens, AUDIT),
    "pytorch#160285": (mixed, mixed_by_hand, AUDIT),
}


def smoothed_by_all_words(params, batch):
    def fn(w, x, labels):
        logits = x @ w
        mean = lax.pmean(logits.mean(-1), "model")
        return own_entropy_by_flags(logits, labels, mean)

    args = params["w"], scaled(params, batch), batch["labels"]
    return by_hand(fn, (COLUMNS, WHOLE, WHOLE), WHOLE, *args)


def own_entropy_by_flags(logits, labels, mean):
    """As `own_entropy`, with a flag for each of a device's words."""
    count = logits.shape[-1]
    most = lax.pmax(lax.stop_gradient(logits).max(-1), "model")
    sums = lax.psum(jnp.exp(logits - most[..., None]).sum(-1), "model")
    words = lax.axis_index("model") * count + jnp.arange(count)
    is_label = labels[..., None] == words[None, None]
    of_label = lax.psum(jnp.where(is_label, logits, 0).sum(-1), "model")
    return most + jnp.log(sums) - 0.9 * of_label - 0.1 * mean


def gathered(params, batch):
    def fn(w, x, labels):
        logits = lax.all_gather(x @ w, "model", axis=-1, tiled=True)
        return entropy(logits, labels)

    args = params["w"], scaled(params, batch), batch["labels"]
    return by_hand(fn, (COLUMNS, WHOLE, WHOLE), WHOLE, *args)


def of_all_tokens(params, batch):
    def fn(losses):
        return lax.psum(losses.sum(-1), "model")

    total = by_hand(fn, TOKENS, WHOLE, plain(params, batch) * batch["counts"])
    return jnp.broadcast_to(total[:, None], batch["counts"].shape)


def mixed_by_all_experts(params, batch):
    def fn(experts, router, x):
        count = experts.shape[0]
        numbers = lax.axis_index("model") * count + jnp.arange(count)
        is_own = numbers[:, None] == jnp.arange(4)[None]
        gates = jax.nn.softmax(x @ router) @ is_own.T.astype(x.dtype)
        out = jnp.einsum(
            "bte,etbd->btd", gates, jnp.einsum("btd,edf->etbf", x, experts)
        )
        return lax.psum(out, "model")

    specs = P("model"), WHOLE, WHOLE
    out = by_hand(fn, specs, WHOLE, params["experts"], params["router"], batch["x"])
    return (out**2).mean(-1)


@jax.custom_vjp
def of_all_of_a_scale(w, scale, x):
    return of_shared_scale(w, scale, x)


def _all_parts(kept, cotangent):
    def fn(w, scale, x, cotangent):
        def own(w, scale):
            return (((x * scale[None, None]) @ w) ** 2).sum(-1)

        of_columns, of_scale = jax.vjp(own, w, scale)[1](cotangent)
        return of_columns, lax.psum(of_scale, "model")

    ins = COLUMNS, WHOLE, WHOLE, WHOLE
    grads = by_hand(fn, ins, (COLUMNS, WHOLE), *kept, cotangent)
    return (*grads, jnp.zeros_like(kept[2]))


of_all_of_a_scale.defvjp(lambda *args: (of_shared_scale(*args), args), _all_parts)


def squared_with_all_parts(params, batch):
    return of_all_of_a_scale(params["w"], params["scale"], batch["x"])


def next_labels_of_all_tokens(params, batch):
    def fn(x, labels, w, scale):
        return entropy((x * scale[None, None]) @ w, labels)

    later = jnp.roll(batch["labels"], -1, 1)
    args = batch["x"], later, params["w"], params["scale"]
    return by_hand(fn, (TOKENS, TOKENS, WHOLE, WHOLE), TOKENS, *args)


def of_a_devices_rows(params, batch):
    def fn(x, labels, w, scale):
        return entropy((x * scale[None, None]) @ w, labels)

    some = P("model")
    args = batch["x"], batch["labels"], params["w"], params["scale"]
    return by_hand(fn, (some, some, WHOLE, WHOLE), some, *args)


# Right forms by hand, and the losses for whole arrays.
BY_HAND = {
    smoothed_by_all_words: smoothed,
    gathered: plain,
    of_all_tokens: None,
    mixed_by_all_experts: mixed,
    squared_with_all_parts: squared,
    next_labels_of_all_tokens: next_labels,
    of_a_devices_rows: plain,
}


def step_of(losses, within=None, weight="counts", times=0, audit=None):
    """The losses are weighed by a share of all tokens, added up so many times."""

    def loss_fn(params, batch, tower):
        found = losses(params, batch)
        count = batch["counts"].sum()
        for _ in range(times):
            count = tower.reduce(tj.Reduction.SUM, count)
        found = found * count if times else found
        return tj.Weighted.mean(found, batch[weight] * tower.weight[:, None])

    clipped = optax.chain(optax.clip_by_global_norm(LIMIT), optax.sgd(RATE))
    within = {"model": 4} if within is None else within
    strategy = tj.Mirrored(towers=2, within=within, specs=SPECS)
    return tj.build_train_step(loss_fn, clipped, strategy, audit=audit)


def assert_of_one_device(step, loss):
    """One clipped step, by plain JAX: the norm is of all experts, heads and words."""
    params = start()
    with jax.enable_x64(True):
        state, metrics = step(step.init(params), rows())
        wanted, grads = jax.jit(jax.value_and_grad(loss))(params)
        assert step.unproved == {}
        assert float(metrics["loss"]) == pytest.approx(float(wanted), rel=1e-12)
        norm = np.sqrt(sum((np.asarray(x) ** 2).sum() for x in grads.values()))
        assert norm > LIMIT
        for name, x in params.items():
            new = x - RATE * grads[name] * LIMIT / norm
            found = np.asarray(state.params[name])
            np.testing.assert_allclose(found, new, rtol=1e-11, atol=1e-13)


# Of cases that have them in common, once.
LOSSES = {right: "counts" for right, *_ in CASES.values()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "weight"),
    [*LOSSES.items(), (plain, "later")],
    ids=[*(x.__name__ for x in LOSSES), "#7452, 3"],
)
def test_for_whole_arrays_it_is_right(losses, weight):
    def loss(params):
        of_tokens = losses(params, rows())
        return (of_tokens * rows()[weight]).sum() / rows()[weight].sum()

    assert_of_one_device(step_of(losses, weight=weight), loss)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not proved")
@pytest.mark.parametrize("name", CASES)
def test_by_hand_it_is_refused(name):
    losses, kind = CASES[name][1:]
    within = {"model": 2, "other": 2} if "4, 6" in name else None
    with jax.enable_x64(True), pytest.raises(kind) as told:
        step = step_of(losses, within)
        step(step.init(start()), rows())
    by = {PROOF: "drift apart", AUDIT: "devices gives another|earlier pass"}
    assert re.search(by[kind], str(told.value))


def within_of(losses):
    """JAX traces other equations for one token, or row, a device."""
    is_of_few = losses in (next_labels_of_all_tokens, of_a_devices_rows)
    return {"model": 2, "other": 2} if is_of_few else None


def unproved(step):
    with jax.enable_x64(True):
        try:
            return step.check(step.init(start()), rows()).unproved
        except (tj.ReplicationError, tj.testing.SplitError) as error:
            return {"step": str(error)}


@pytest.mark.slow
@pytest.mark.parametrize("losses", BY_HAND)
def test_what_is_right_by_hand_is_proved(losses):
    assert unproved(step_of(losses, within_of(losses))) == {}


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", CASES)
def test_no_fault_by_hand_is_proved(name):
    within = {"model": 2, "other": 2} if "4, 6" in name else None
    assert unproved(step_of(CASES[name][1], within))


@pytest.mark.slow
@pytest.mark.parametrize("losses", [x for x, whole in BY_HAND.items() if whole])
def test_what_is_right_by_hand_passes_where_a_proof_is_asked_for(losses):
    whole = BY_HAND[losses]

    def loss(params):
        counts = rows()["counts"]
        return (whole(params, rows()) * counts).sum() / counts.sum()

    step = step_of(losses, within_of(losses), audit=True)
    assert_of_one_device(step, loss)


@pytest.mark.slow
def test_a_count_of_all_tokens_is_added_up_once():
    """#7452, 10."""

    def loss(params):
        counts = rows()["counts"]
        return (plain(params, rows()) * counts).sum()

    assert_of_one_device(step_of(plain, times=1), loss)
    with jax.enable_x64(True), pytest.raises(AUDIT):
        step = step_of(plain, times=2)
        step(step.init(start()), rows())


def test_the_page_has_a_line_of_each():
    page = ROOT / "docs/how_to/tensor_and_expert_parallel.md"
    lines = re.findall(r"^\| \[(.*?)\](.*?):.*? \| (.*?) \|$", page.read_text(), re.M)
    said = {f"{thread}{number}": hand for thread, number, hand in lines}
    of = {PROOF: "by the proof", AUDIT: "by the audit"}
    wanted = {name: of[kind] for name, (_, _, kind) in CASES.items()}
    wanted |= {"#7452, 10": of[AUDIT]}
    # Each step above is clipped; and another test restores on other devices.
    wanted |= dict.fromkeys(("#7452, 8", "#5916", "#7452, 12"), "-")
    within = (ROOT / "tests/towers/test_within.py").read_text()
    assert "def test_a_checkpoint_goes_on_with_other_towers(" in within
    assert said == wanted
