"""The tower-dependence analysis: which programs it refuses, and which it lets pass."""

import inspect
from pathlib import Path

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from analysed import AXIS, psum, study, trace
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from layouts import cases

import towerjax as tj
from towerjax.prover.replication.analysis import analyse
from towerjax.prover.replication.findings import (
    Analysis,
    Dependence,
    Hang,
    ReplicationError,
    prove_mirrored,
)


def line_of(function, text):
    """The end of the `line` that the analysis should report for a line of ours."""
    lines, first = inspect.getsourcelines(function)
    [number] = [i for i, line in enumerate(lines, first) if text in line]
    return f"test_analysis.py:{number}"


def loss_of(w, x):
    return jnp.sum(jnp.tanh(x @ w))


# Refused: an output declared MIRRORED that is not. `# here` marks the reported line.


class Refused:
    def scan_carry(w, x):
        def body(total, row):
            return total + row, None  # here

        return lax.scan(body, jnp.zeros(4), x)[0]

    def scan_shifts_carry(w, x):
        # The dependence needs three trips to arrive at the last carry.
        def body(carry, row):
            a, b, c = carry
            return (a + row, a, b), None  # here

        return lax.scan(body, (w, w, w), jnp.concatenate([x, x]))[0][2]

    def while_carry(w, x):
        return lax.while_loop(
            lambda carry: carry[0] < 3,
            lambda carry: (carry[0] + 1, carry[1] + x[0]),  # here
            (0, w),
        )[1]

    def while_bound(w, x):
        return lax.while_loop(lambda i: i < x[0, 0], lambda i: i + 1.0, w[0])

    def switch_on_tower(w, x):
        index = x[0, 0].astype(int)
        return lax.switch(index, [lambda: w, lambda: w, lambda: 2 * w])  # here

    def sum_in_groups(w, x):
        size = lax.axis_size(AXIS)
        return lax.psum(x, AXIS, axis_index_groups=[[i] for i in range(size)])  # here

    def all_to_all_of_equals(w, x):
        rows = jnp.broadcast_to(w, (lax.axis_size(AXIS), 4))
        return lax.all_to_all(rows, AXIS, 0, 0, tiled=True)  # here

    def scattered_sum(w, x):
        rows = jnp.broadcast_to(w, (lax.axis_size(AXIS), 4))
        return lax.psum_scatter(rows, AXIS, tiled=True)  # here

    def ring_shift(w, x):
        size = lax.axis_size(AXIS)
        pairs = [(i, (i + 1) % size) for i in range(size)]
        return lax.ppermute(x, AXIS, pairs)  # here

    def partial_permutation(w, x):
        pairs = [(i, i + 1) for i in range(lax.axis_size(AXIS) - 1)]
        return lax.ppermute(w, AXIS, pairs)

    def linear_solve(w, x):
        return lax.custom_linear_solve(lambda v: 2 * v, x[0], lambda _, b: b / 2)

    def io_result(w, x):
        shape = jax.ShapeDtypeStruct((4,), jnp.float32)
        return jax.experimental.io_callback(lambda w: w, shape, w)  # here

    def callback_result(w, x):
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((2, 4), x.dtype), x)

    def kernel_with_tower_id(w, x):
        def kernel(w_ref, out_ref):
            out_ref[...] = w_ref[...] + lax.axis_index(AXIS)

        return pl.pallas_call(kernel, out_shape=w)(w)  # here

    def ref_holds_tower(w, x):
        ref = jax.new_ref(w)
        ref[...] = x[0]
        return ref[...]

    def ref_written_in_scan(w, x):
        ref = jax.new_ref(w)

        def body(_, row):
            ref[...] += row
            return None, None

        lax.scan(body, None, x)
        return ref[...]


REFUSED = cases(Refused) | dict(
    forgotten_reduction=lambda w, x: w - jax.grad(loss_of)(w, x),  # here
    returned_as_it_came=lambda w, x: x,
    cond_on_tower=lambda w, x: lax.cond(x[0, 0] > 0, lambda: w, lambda: 2 * w),  # here
    tower_id=lambda w, x: w * lax.axis_index(AXIS),  # here
    tower_id_in_jit=lambda w, x: jax.jit(lambda w: w + lax.axis_index(AXIS))(w),  # here
    custom_vjp_gradient=lambda w, x: jax.grad(clipped)(w, x),
    custom_vjp_value=lambda w, x: clipped(w, x),
    library_jit=lambda w, x: jnp.argsort(x[0]),  # here
    stateful_random=lambda w, x: lax.rng_uniform(w[0], w[1], (3,)),  # here
    a_name_like_ours=lambda w, x: checkpoint_name(
        x.sum(),  # here
        "towerjax.replicated",
    ),
)


@jax.custom_vjp
def clipped(w, x):
    return loss_of(w, x)


clipped.defvjp(
    lambda w, x: (loss_of(w, x), (w, x)),
    lambda res, g: (g * jnp.sum(res[1], axis=0), None),  # here
)


# What they depend on, where it is not the batch.
SOURCES = {"all_to_all_of_equals": "all_to_all", "scattered_sum": "reduce_scatter"}
SOURCES |= {"partial_permutation": "ppermute", "io_result": "io_callback"}
SOURCES |= {"stateful_random": "rng_uniform"}
SOURCES |= {x: "tower.id" for x in REFUSED if "tower_id" in x}


@pytest.mark.few_fast(7)
@pytest.mark.parametrize("num_towers", [1, 4096])
@pytest.mark.parametrize("name", REFUSED)
def test_dependent_output_is_refused(name, num_towers):
    tower = REFUSED[name]
    analysis = study(tower, num_towers)
    [dependence] = analysis.outputs
    assert dependence is not None, "it passed"
    assert dependence.source == SOURCES.get(name, "batch['x']")
    if "# here" in inspect.getsource(tower):
        assert line_of(tower, "# here") in dependence.line
    if name == "custom_vjp_value":
        assert line_of(loss_of, "return jnp.sum") in dependence.line
    with pytest.raises(ReplicationError, match="params"):
        prove_mirrored(analysis, ["params"])
    prove_mirrored(analysis, [None])


# Refused: a collective that not every tower reaches. `# sum` and `# control` mark.


class Hanging:
    def sum_under_cond(w, x):
        kept = lax.cond(  # control
            x[0, 0] > 0,
            lambda: lax.psum(w, AXIS),  # sum
            lambda: w,
        )
        return psum(kept)

    def broadcast_under_cond(w, x):
        kept = lax.cond(  # control
            x[0, 0] > 0,
            lambda: lax.pbroadcast(w, (AXIS,), 1),  # sum
            lambda: w,
        )
        return psum(kept)

    def sum_under_cond_in_scan_in_jit(w, x):
        def body(total, row):
            partial = lax.cond(  # control
                row[0] > 0,
                jax.jit(lambda: lax.psum(w, AXIS)),  # sum
                lambda: w,
            )
            return total + partial, None

        return psum(jax.jit(lambda w: lax.scan(body, w, x)[0])(w))

    def sum_in_scan_under_cond(w, x):
        def body(total, row):
            return total + lax.psum(row, AXIS), None  # sum

        scanned = lambda: lax.scan(body, w, x)[0]  # noqa: E731
        return psum(lax.cond(x[0, 0] > 0, scanned, lambda: w))  # control

    def sum_under_while(w, x):
        total = lax.while_loop(  # control
            lambda carry: carry[0] < x[0, 0],
            lambda carry: (carry[0] + 1, lax.psum(carry[1], AXIS)),  # sum
            (0.0, w),
        )
        return psum(total[1])

    def sum_under_while_on_carry(w, x):
        # The predicate becomes the tower's own only after the first trip.
        total = lax.while_loop(  # control
            lambda total: total[0] < 3,
            lambda total: lax.pmax(w, AXIS) + x[0],  # sum
            w,
        )
        return psum(total)

    def sum_in_the_predicate(w, x):
        total = lax.while_loop(  # control
            lambda total: lax.pmin(w[0], AXIS) < total[0],  # sum
            lambda total: total - x[0],
            w,
        )
        return psum(total)

    def sum_that_a_branch_writes(w, x):
        ref = jax.new_ref(w)

        def write():
            ref[...] = lax.psum(w, AXIS)  # sum

        lax.cond(x[0, 0] > 0, write, lambda: None)  # control
        return psum(ref[...])

    def cond_on_late_carry(w, x):
        # The predicate is mirrored on the first trip and the tower's own on the second.
        def body(carry, row):
            kept = lax.cond(  # control
                carry[0] > 0,
                lambda: lax.psum(w, AXIS),  # sum
                lambda: w,
            )
            return row + kept, None

        return psum(lax.scan(body, w, x)[0])


CONTROLS = {
    "broadcast_under_cond": ("pbroadcast", "cond"),
    "sum_under_while": ("psum", "while"),
    "sum_under_while_on_carry": ("pmax", "while"),
    "sum_in_the_predicate": ("pmin", "while"),
}


@pytest.mark.parametrize("num_towers", [1, 4096])
@pytest.mark.parametrize("name", cases(Hanging))
def test_collective_that_not_every_tower_reaches(name, num_towers):
    tower = cases(Hanging)[name]
    analysis = study(tower, num_towers)
    assert len(analysis.hangs) == 1
    [hang] = analysis.hangs
    assert (hang.primitive, hang.control) == CONTROLS.get(name, ("psum", "cond"))
    assert line_of(tower, "# sum") in hang.line
    assert line_of(tower, "# control\n") in hang.control_line
    assert analysis.outputs == (None,)
    with pytest.raises(ReplicationError, match="would hang"):
        prove_mirrored(analysis, [None])


# Legal programs.


class Legal:
    def scan_with_sum_inside(w, x):
        return lax.scan(lambda total, row: (total + psum(row), psum(row)), w, x)

    def scan_reduces_its_carry(w, x):
        return lax.scan(lambda total, row: (psum(total + row), None), x[0], x)[0]

    def zero_carry_reduced_after(w, x):
        return psum(lax.scan(lambda t, row: (t + row, None), jnp.zeros(4), x)[0])

    def cond_on_reduced_predicate(w, x):
        ok = lax.pmin(jnp.isfinite(x).all().astype(int), AXIS) > 0
        return lax.cond(ok, lambda: psum(x[0]), lambda: w)

    def cond_on_tower_without_collective(w, x):
        return psum(lax.cond(x[0, 0] > 0, lambda: x[0], lambda: w))

    def custom_jvp(w, x):
        return psum(jax.grad(lambda w: sharpened(x * w[None]).sum())(w)), sharpened(w)

    def nested_jit(w, x):
        @jax.jit
        def inner(w, x):
            return jax.jit(psum)(x), x, w

        total, _, same = inner(w, x)
        return total, same

    def while_with_mirrored_bound(w, x):
        return lax.while_loop(lambda t: t[0] < w[1], lambda t: t + psum(x[0]), w)

    def loop_with_mirrored_length(w, x):
        return lax.fori_loop(0, 3, lambda i, t: t * i + psum(x[i % 2]), w)

    def gathered(w, x):
        return lax.all_gather(x, AXIS), lax.all_gather(x, AXIS, tiled=True)

    def barrier_over_mixed_tuple(w, x):
        w, x = lax.optimization_barrier((w, x))
        return w, psum(x)

    def summed_gradient_through_psum(w, x):
        total = lambda w: psum(loss_of(w, x)) / lax.axis_size(AXIS)  # noqa: E731
        return psum(jax.grad(total)(w))

    def attention(w, x):  # which masks with an infinite number
        def loss(w):
            q = x * w[None]
            weights = jax.nn.softmax(q @ x.T, where=jnp.tri(2) > 0)
            return jnp.mean((weights @ x) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return psum(value), psum(grad)

    def full_permutation_of_equals(w, x):
        size = lax.axis_size(AXIS)
        return lax.ppermute(w, AXIS, [(i, (i + 1) % size) for i in range(size)])

    def sharded_update(w, x):
        rows = jnp.broadcast_to(x[0], (lax.axis_size(AXIS), 4))
        own = lax.psum_scatter(rows, AXIS, tiled=True)
        return lax.all_gather(own, AXIS, tiled=True)

    def vmapped_sum(w, x):
        return jax.vmap(lambda row: lax.psum(row, ("row", AXIS)), axis_name="row")(x)

    def pure_callback_of_equals(w, x):
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((4,), w.dtype), w)

    def kernel_of_equals(w, x):
        def kernel(w_ref, out_ref):
            out_ref[...] = 2 * w_ref[...]

        return pl.pallas_call(kernel, out_shape=w)(w)

    def mirrored_ref(w, x):
        ref = jax.new_ref(jnp.zeros(4))
        ref[...] += psum(x[0])
        return ref[...]

    def printed(w, x):
        jax.debug.print("{}", x)
        return w

    def solved_with_equals(w, x):
        return lax.custom_linear_solve(lambda v: 2 * v, w, lambda _, b: b / 2)

    def solved_iteratively(w, x):
        solvers = jax.scipy.sparse.linalg
        operator = reduced_operator(x)
        solve = [solvers.cg, solvers.gmres, solvers.bicgstab]
        return [solve(operator, w)[0] for solve in solve]

    def gradient_of_a_solution(w, x):
        solve = jax.scipy.sparse.linalg.cg
        return jax.grad(lambda w: solve(reduced_operator(x), w)[0].sum())(w)

    def one_group_of_all(w, x):
        size = lax.axis_size(AXIS)
        groups = [list(reversed(range(size)))] if size > 1 else None
        mean = lax.pmean(x, AXIS, axis_index_groups=groups)
        return mean, lax.all_gather(x, AXIS, axis_index_groups=groups)


LEGAL = cases(Legal) | dict(
    reduced_gradient=lambda w, x: w - lax.pmean(jax.grad(loss_of)(w, x), AXIS),
    custom_vjp=lambda w, x: (psum(jax.grad(clipped)(w, x)), psum(clipped(w, x))),
    remat=lambda w, x: psum(jax.grad(jax.checkpoint(loss_of))(w, x)),
    extremes=lambda w, x: (lax.pmax(x, AXIS), lax.pmin(x, AXIS)),
    mirrored_noise=lambda w, x: w + jax.random.normal(jax.random.key(0), (4,)),
)


@jax.custom_jvp
def sharpened(x):
    return x**2


sharpened.defjvp(lambda primals, tangents: (primals[0] ** 2, 3.0 * tangents[0]))


def reduced_operator(x):
    return lambda v: v + lax.pmean(x.T @ (x @ v), AXIS)


@pytest.mark.few_fast(3)
@pytest.mark.parametrize("num_towers", [1, 4096])
@pytest.mark.parametrize("name", LEGAL)
def test_legal_program_passes(name, num_towers):
    analysis = study(LEGAL[name], num_towers)
    assert analysis.hangs == ()
    names = [f"output {i}" for i in range(len(analysis.outputs))]
    assert names
    prove_mirrored(analysis, names)


def test_axis_that_is_not_a_tower_axis_does_not_count():
    def tower(w, x):
        return w * lax.axis_index("model"), lax.psum(x, "model"), lax.psum(x, "device")

    body = trace(tower, shape=(2, 4), axes=("device", "model"))
    same, differs, reduced = analyse(body, [None, "x"], "device", 2).outputs
    assert (same, reduced) == (None, None)
    assert differs is not None and differs.source == "x"


# What is reported.


def test_of_several_that_differ_the_first_is_named():
    def tower(w, x, y):
        rows = jnp.concatenate([w[None], y, x])
        return x + y, y * x, rows, lax.cond(w[0] > 0, lambda: x, lambda: w[None] + y)

    jaxpr = jax.make_jaxpr(tower)(np.ones(4), np.ones((2, 4)), np.ones((2, 4)))
    found = analyse(jaxpr, [None, "x", "y"], AXIS, 2).outputs
    assert [x.source for x in found] == ["x", "y", "y", "y"]


def one_bad_leaf(w, x):
    return {"a": psum(x), "b": x.sum(), "c": w, "d": psum(2.0)}  # here


def test_one_bad_leaf_of_many_is_the_only_one_named():
    analysis = study(one_bad_leaf)
    with pytest.raises(ReplicationError) as caught:
        prove_mirrored(analysis, ["['a']", "['b']", "['c']", "['d']"])
    assert str(caught.value).count("  - ") == 1
    assert "  - ['b'] depends on batch['x']" in str(caught.value)


def test_error_text_lists_outputs_and_hangs():
    analysis = Analysis(
        outputs=(
            Dependence("batch['x']", "train.py:3 (loss_fn)"),
            None,
            Dependence("batch['y']", ""),
            Dependence("tower.id", "train.py:4 (loss_fn)"),
        ),
        hangs=(Hang("psum", "train.py:8 (step)", "cond", "train.py:7 (step)"),),
        collectives=(),
    )
    with pytest.raises(ReplicationError) as caught:
        prove_mirrored(analysis, ["params['w']", "loss", "params['b']", None])
    assert str(caught.value) == (
        "These outputs must be the same on every tower, but are not:\n"
        "  - params['w'] depends on batch['x'] and is not reduced over all towers; "
        "it is made at train.py:3 (loss_fn)\n"
        "  - params['b'] depends on batch['y'] and is not reduced over all towers; "
        "it is returned unchanged\n"
        "Return tj.Weighted.mean(values, tower.weight) or tj.Sum(value), which add up"
        " over\ntowers; for gradients call tj.value_and_grad(loss_fn). Or reduce it,\n"
        "tower.reduce(tj.Reduction.MEAN, value), or keep it per tower:"
        " tj.PerTower(value), or\nTowerOutput(local=...).\n"
        "Only some towers reach these collectives, so devices would hang:\n"
        "  - psum at train.py:8 (step), under the cond at train.py:7 (step), whose "
        "predicate differs from tower to tower\n"
        "Make the predicate the same on all towers with tower.reduce, or move the\n"
        "merge_call or reduction out of the cond or while."
    )


def test_line_of_cached_library_code_is_that_of_this_call():
    def first(w, x):
        return jnp.argsort(x[0])

    def second(w, x):
        return jnp.argsort(x[0])  # this

    study(first)  # jnp.argsort is a jit: its trace is cached from this call
    [dependence] = study(second).outputs
    assert line_of(second, "# this") in dependence.line


def test_path_is_relative_to_the_current_directory(monkeypatch, tmp_path, request):
    own = "test_analysis.py:"
    folder = request.path.parent
    below = f"{folder.name}/{own}"
    for at, start in (folder.parent, below), (folder, own), (tmp_path, below):
        monkeypatch.chdir(at)
        [dependence] = study(REFUSED["forgotten_reduction"]).outputs
        assert dependence.line.startswith(start)


@pytest.mark.parametrize("folder, skipped", [("towerjax", True), ("towerjax2", False)])
def test_lines_of_towerjax_itself_are_skipped(folder, skipped):
    package = Path(inspect.getfile(tj)).parent
    names = {}
    path = package.with_name(folder) / "helper.py"
    exec(compile("def twice(x): return x + x", path, "exec"), names)

    def tower(w, x):
        return names["twice"](x)

    [dependence] = study(tower).outputs
    assert dependence.line.endswith("(tower)" if skipped else "(twice)")


class Sends:
    def several(w, x):
        def body(carry, row):
            inner = lax.fori_loop(0, 3, lambda i, t: t + psum(row), carry)
            return inner, lax.pmax(row[:2], AXIS)

        total, _ = lax.scan(body, w, x)
        gathered = lax.all_gather(x.astype(jnp.bfloat16), AXIS)  # this
        bounded = lax.while_loop(lambda t: t[0] < 9, lambda t: t + psum(w), total)
        return bounded, gathered, lax.psum((w, x), AXIS)

    def in_a_loop_that_is_walked_often(w, x):
        def body(carry, row):
            a, b, c = carry
            return (a + row, a, b + psum(b)), None

        return lax.scan(body, (w, w, w), x)

    def in_the_solution_of_a_linear_solve(w, x):
        return lax.custom_linear_solve(
            lambda v: 2 * psum(v), w, lambda _, b: psum(b), lambda _, b: b
        )

    def in_every_branch(w, x):
        return lax.cond(w[0] > 0, lambda: psum(w), lambda: lax.pmax(w, AXIS))

    def from_one_tower(w, x):
        return lax.pbroadcast(x, (AXIS,), 1)


SENT = {
    "several": [
        ("psum", 4 * 4, 2 * 3),  # scan of 2 rows around a loop of 3
        ("pmax", 2 * 4, 2),
        ("all_gather", 2 * 4 * 2, 1),  # bfloat16
        ("psum", 4 * 4, None),  # under a while
        ("psum", 4 * 4, 1),
        ("psum", 2 * 4 * 4, 1),
    ],
    "in_a_loop_that_is_walked_often": [("psum", 16, 2)],
    "in_the_solution_of_a_linear_solve": [("psum", 16, 1)],
    "in_every_branch": [("pmax", 16, 1), ("psum", 16, 1)],
    "from_one_tower": [("pbroadcast", 32, 1)],
}


@pytest.mark.parametrize("name", SENT)
def test_collectives_with_bytes_and_trips(name):
    found = study(cases(Sends)[name], num_towers=4)
    sent = found.collectives
    assert [(c.primitive, c.bytes, c.trips) for c in sent] == SENT[name]
    assert all(c.axes == (AXIS,) for c in sent)
    if name == "several":
        assert line_of(Sends.several, "# this") in sent[2].line
    if name == "from_one_tower":
        assert found.outputs == (None,)


# Memory and solvers.


@pytest.mark.slow
def test_a_reduced_operator_is_solved_alike_on_all_towers():
    w = np.arange(1.0, 5.0)
    x = np.random.default_rng(0).normal(size=(3, 2, 4))
    towers = jax.jit(jax.vmap(Legal.solved_iteratively, (None, 0), axis_name=AXIS))
    mean = np.mean([rows.T @ rows for rows in x], axis=0)
    for rows in towers(jnp.float32(w), jnp.float32(x)):
        np.testing.assert_array_equal(rows[0], rows[1])
        np.testing.assert_array_equal(rows[0], rows[2])
        solution = np.linalg.solve(np.eye(4) + mean, w)
        np.testing.assert_allclose(rows[0], solution, rtol=1e-3)


def test_a_solver_of_what_differs_is_refused():
    def own_operator(w, x):
        return jax.scipy.sparse.linalg.cg(lambda v: v + x.T @ (x @ v), w)[0]

    def own_steps(w, x):
        return psum(jax.scipy.sparse.linalg.cg(reduced_operator(x), x[0])[0])

    assert study(own_operator).outputs[0].source == "batch['x']"
    [hang] = study(own_steps).hangs
    assert (hang.primitive, hang.control) == ("psum", "while")


def ref_scanned(value):
    ref = jax.new_ref(jnp.zeros(4))

    def body(_, i):
        ref[...] += value()
        return None, None

    lax.scan(body, None, jnp.arange(2))
    return ref[...]


def test_a_loop_over_memory_is_walked():
    def tower(w, x):
        same = ref_scanned(lambda: w)
        by_id = ref_scanned(lambda: w * lax.axis_index(AXIS))
        return same, by_id, ref_scanned(lambda: lax.pmean(x[0], AXIS))

    analysis = study(tower, 4)
    same, by_id, _ = analysis.outputs
    assert same is None and by_id.source == "tower.id"
    assert [c.primitive for c in analysis.collectives] == ["psum"]
