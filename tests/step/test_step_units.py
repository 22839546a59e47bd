"""The functions of a step, each by itself: its flags, what it accepts and keeps."""

import threading
import types

import forked
import guards
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax

import towerjax as tj
from towerjax.step.run import programs
from towerjax.step.run.step_flags import (
    MOST_STATES,
    NONE,
    Lineage,
    StepFlags,
    next_step_flag,
    send_to_host,
)
from towerjax.step.run.trace import Traced
from towerjax.step.state.checks import is_usable
from towerjax.step.state.desync import fingerprint, outliers
from towerjax.step.state.next_state import accept_or_keep


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_step_flag_on_a_gpu_is_asked_for_each_eighth_call_and_read_at_the_next(
    num_devices,
):
    """By an explicit transfer, which a transfer guard allows."""
    events = []

    class StepFlag:
        def __init__(self, number):
            self.number = number
            self.is_sent = False

        def copy_to_host_async(self):
            assert guards.asked_for()
            self.is_sent = True
            events.append(("sent", call))

        def __array__(self, dtype=None, copy=None):
            assert guards.asked_for() and self.is_sent
            events.append(("read", call))
            return np.asarray(self.number)

    placement = types.SimpleNamespace(
        platform="cuda", num_processes=1, num_devices=num_devices
    )
    step_flags = StepFlags(placement, tj.NonFiniteError)
    state = object()
    step_flags.put(Lineage(state, StepFlag(NONE)))
    for call in range(1, 25):  # step 9 is refused, just too late to be asked for
        if call == 24:
            with pytest.raises(tj.NonFiniteError, match="of step 9 "):
                step_flags.check(state)
            break
        step_flags.check(state)
        line = step_flags.take(state)
        before = line.step_flag.number
        line.step_flag = StepFlag(before if before != NONE or call != 9 else 9)
        step_flags.put(line)
    times = [("sent", 8), ("sent", 16), ("read", 16), ("sent", 24), ("read", 24)]
    assert events == times
    step_flags.settle()  # it is told once
    nothing = object()  # on CPUs nothing is sent
    send_to_host(nothing, types.SimpleNamespace(platform="cpu"))


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("bad", [0, 6, 8, 18])
def test_a_program_keeps_the_first_step_that_was_refused(bad, num_devices):
    placement = tj.Mirrored([f"cpu:{i}" for i in range(num_devices)]).placement
    step_flags = StepFlags(placement, tj.NonFiniteError)
    program = jax.jit(next_step_flag)
    state = object()
    for number in range(20):
        refused = number if number in (bad, 19) else NONE
        line = step_flags.take(state)
        step_flags.put(Lineage(state, program(line.step_flag, np.int32(refused))))
    with pytest.raises(tj.NonFiniteError, match=f"of step {bad} "):
        step_flags.settle()
    step_flags.settle()  # nothing pends
    assert step_flags.take(state).step_flag is step_flags.none


def test_threads_that_call_at_once_keep_each_others_step_flags():
    placement = tj.OneDevice().placement
    step_flags = StepFlags(placement, tj.NonFiniteError)
    state = object()
    assert step_flags.take(state).step_flag is step_flags.take(state).step_flag
    step_flags.put(Lineage(state, jnp.int32(7)))
    step_flags.put(Lineage(state, jnp.int32(NONE)))
    with pytest.raises(tj.NonFiniteError, match="of step 7 "):
        step_flags.settle()


def test_step_flags_on_states_that_were_left_are_few_and_none_is_lost():
    step_flags = StepFlags(tj.OneDevice().placement, tj.NonFiniteError)
    for number in range(200):
        step_flags.put(Lineage(object(), jnp.int32(5 if number == 3 else NONE)))
    assert len(step_flags._lines) <= MOST_STATES
    with pytest.raises(tj.NonFiniteError, match="of step 5 "):
        step_flags.settle()
    step_flags.settle()


def test_of_several_processes_each_waits_and_those_that_skip_do_not_raise():
    """A step may show that another process has died, which no step flag would."""

    class Lost:
        def copy_to_host_async(self):
            pass

        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("Connection closed by peer")

    several = types.SimpleNamespace(platform="cuda", num_processes=2)
    skips = StepFlags(several, None)
    state = object()
    skips.put(Lineage(state, jnp.int32(3)))
    skips.settle()
    skips.put(Lineage(state, Lost()))
    for _ in range(15):
        skips.check(state)
    with pytest.raises(RuntimeError, match="closed by peer"):
        skips.check(state)


class StepFlag:
    """One that arrives when it is told to, and counts who waits for it."""

    def __init__(self, number=NONE):
        self.number = number
        self.has_arrived = False
        self.waits = 0

    def is_ready(self):
        return self.has_arrived

    def addressable_data(self, index):
        return self

    def __array__(self, dtype=None, copy=None):
        self.waits += not self.has_arrived
        return np.asarray(self.number, dtype)


@pytest.mark.parametrize("processes", [1, 2])
def test_step_flags_are_not_waited_for_and_processes_look_at_the_same_calls(processes):
    placement = types.SimpleNamespace(
        platform="cpu", devices=("cpu:0",) * processes, num_processes=processes
    )
    step_flags = StepFlags(placement, tj.NonFiniteError)
    given = [StepFlag() for _ in range(15)] + [StepFlag(2)]
    state = object()
    line = Lineage(state, StepFlag())
    for i, step_flag in enumerate(given):
        if i == 15:  # a call of 8 before is waited for, so that few are in flight
            given[6].has_arrived = True
        step_flags.put(line)
        step_flags.check(state)
        line = step_flags.take(state)
        line.step_flag = step_flag
    step_flags.put(line)
    assert not any(step_flag.waits for step_flag in given)
    given[-1].has_arrived = True
    if processes == 2:
        for _ in range(15):  # the other process may not see it yet
            step_flags.check(state)
    with pytest.raises(tj.NonFiniteError, match="of step 2 "):
        step_flags.check(state)


@pytest.mark.parametrize("hold", [list, tuple, lambda x: {"w": x}, lambda x: [[*x]]])
def test_a_state_is_usable_until_it_is_donated(hold):
    w = jnp.ones(2)
    state = tj.TrainState.create(hold([w]), optax.sgd(0.1))
    assert is_usable(state)
    w.delete()
    assert not is_usable(state)


@pytest.mark.slow
def test_bits_of_every_type_make_the_fingerprint():
    quiet = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    pairs = [  # equal as numbers, or almost, and different in bits
        (np.float32([0.0]), np.float32([-0.0])),
        (quiet[:1], quiet[1:]),
        (np.array([1, 2], ml_dtypes.bfloat16), np.array([2, 1], ml_dtypes.bfloat16)),
        (np.array([1.0], ml_dtypes.float8_e4m3fn), np.array([2], "float8_e4m3fn")),
        (np.float16([0, 1]), np.float16([1, 0])),  # swapped
        (np.array([True, False]), np.array([False, True])),
        (np.int8([-1]), np.int8([1])),
        (np.uint8([[1, 2], [3, 4]]), np.uint8([[1, 3], [2, 4]])),
        (np.complex64([1 + 2j]), np.complex64([2 + 1j])),
        (np.int32([0, 0]), np.int32([0, -(1 << 31)])),
        (np.zeros(3, np.float32), np.zeros(3, np.float32) + np.float32(1e-45)),
        (np.zeros((0, 3)), np.ones(1, np.float32)),
    ]
    of = jax.jit(lambda trees: jax.tree.map(fingerprint, trees))
    firsts, seconds = np.array(jax.tree.map(int, of([*pairs]))).T
    assert (firsts != seconds).all(), (firsts, seconds)
    with jax.enable_x64(True):
        # Of the one half of the bits, of the other.
        three = of([np.float64([x]) for x in (1, 1 + 2**-52, 2)])
    assert len(set(map(int, three))) == 3


@pytest.mark.slow
def test_each_bit_of_each_element_shows():
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    of = jax.jit(jax.vmap(fingerprint))
    bits = np.tile(x.view(np.uint32).reshape(-1), (1 + 12 * 32, 1))
    for element in range(12):
        for bit in range(32):
            bits[1 + element * 32 + bit, element] ^= np.uint32(1) << np.uint32(bit)
    prints = of(lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32))
    assert len(set(np.asarray(prints).tolist())) == 1 + 12 * 32


def test_most_devices_are_right_and_of_halves_the_first_is():
    table = np.array([[7, 1, 5], [7, 2, 6], [7, 2, 5], [7, 3, 6]])
    wrong = [[False, True, False], [False, False, True]]
    wrong += [[False, False, False], [False, True, True]]
    assert outliers(table).tolist() == wrong


EXACT = {"state": "sharded", "cross_tower_ops": tj.PinnedTree(), "tower_loop": "scan"}


WITHIN = {"within": {"model": 2}}


@pytest.mark.parametrize("options, devices, hold_update, expected", [
    ({}, 2, False, False),
    ({}, 2, True, False),
    (WITHIN, 4, False, False),
    (WITHIN, 4, True, True),
    (EXACT, 2, False, True),
    (EXACT, 1, False, False),
    (EXACT | {"state": "mirrored"}, 2, False, False),
    ({"state": "sharded"}, 2, False, False),
])  # fmt: skip
def test_which_updates_each_device_runs(options, devices, hold_update, expected):
    names = [f"cpu:{i}" for i in range(devices)]
    plan = types.SimpleNamespace(
        strategy=tj.Mirrored(names, towers=2, **options),
        passes=types.SimpleNamespace(hold_update=hold_update),
    )
    for accepts in (True, False):  # one that accepts nothing has no update
        plan.accepts = accepts
        traced = Traced(plan, (), (), None, None)
        assert traced.update_on_devices == (expected and accepts)


# What a step that may be refused makes of its state.


def bits(x):
    return np.asarray(x).view(np.uint32)


def odd_table(seed=0):
    """With what arithmetic would change: -0.0, infinity, NaN with bits of its own."""
    table = np.random.default_rng(seed).normal(size=(6, 2)).astype(np.float32)
    table[1] = -0.0
    table[3] = np.array([np.inf, 0], np.float32)
    table.view(np.uint32)[4, 0] = 0x7FC01234
    return table


IDS = np.array([1, 3, 4, 1, 7, -1])


NEW = np.arange(12, dtype=np.float32).reshape(6, 2)


def one_by_one(table):
    for i in IDS:
        table = table.at[i % 6].set(NEW[i % 6])
    return table


def stacked(table):
    """What vmap makes of a value that all of its rows have in common."""
    out = jax.vmap(lambda i: (i, table.at[IDS].add(NEW)))(jnp.arange(3))[1]
    return out[1]


UPDATES = {
    "set": lambda x: x.at[IDS].set(NEW),
    "add": lambda x: x.at[IDS].add(NEW),
    "multiply": lambda x: x.at[IDS].multiply(NEW),
    "dropped": lambda x: x.at[IDS].set(NEW, mode="drop"),
    "clipped": lambda x: x.at[IDS].add(NEW, mode="clip"),
    "columns": lambda x: x.at[:, 1].set(0),
    "elements": lambda x: x.at[IDS, IDS % 2].add(NEW[:, 0]),
    "slice": lambda x: lax.dynamic_update_slice(x, jnp.ones((2, 2)), (3, 0)),
    "one by one": one_by_one,
    "stacked": stacked,
    "rows, then all": lambda x: x.at[IDS].add(NEW) * 2,
    "all, then rows": lambda x: (x * 2).at[IDS].add(NEW),
    "nested": jax.jit(lambda x: x.at[IDS].add(NEW)),
    "transposed": lambda x: x.T[:, ::-1].T.at[IDS].add(NEW),
}


def update_if(accepted, update, carry):
    return accept_or_keep(lambda carry: (accepted, update(carry), ()), carry)[0]


@pytest.fixture(scope="module")
def updated():
    """By name what each update makes: ``(refused, accepted, plain)``."""

    @jax.jit
    def run(accepted, x):
        return {name: update_if(accepted, f, x) for name, f in UPDATES.items()}

    @jax.jit
    def plain(x):
        return {name: update(x) for name, update in UPDATES.items()}

    made = run(False, odd_table()), run(True, odd_table()), plain(odd_table())
    return jax.device_get(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
def test_a_refusal_keeps_every_bit_and_what_is_accepted_is_the_update(name, updated):
    refused, accepted, plain = (found[name] for found in updated)
    np.testing.assert_array_equal(bits(refused), bits(odd_table()))
    np.testing.assert_array_equal(accepted, plain)


@pytest.mark.parametrize("name", [*UPDATES][:4] + [*UPDATES][5:9])
def test_where_rows_are_written_they_alone_are_selected(name):
    def run(*x):
        return update_if(x[0], UPDATES[name], x[1])

    table = odd_table()
    eqns = jax.make_jaxpr(run)(True, table).eqns
    selected = [x.outvars[0].aval.shape for x in eqns if x.primitive is lax.select_n_p]
    assert table.shape not in selected


def test_a_refused_first_step_has_no_derivative_by_its_rate():
    def kept(rate, accepted):
        optimizer = optax.adam(rate)  # divides by 1 - b**count

        def update(carry):
            updates, state = optimizer.update(jnp.ones(2), carry[1], carry[0])
            return carry[0] + updates, state

        carry = jnp.ones(2), optimizer.init(jnp.ones(2))
        return update_if(accepted, update, carry)[0].sum()

    of_rate = jax.jit(jax.grad(kept))
    assert of_rate(0.1, False) == 0
    assert of_rate(0.1, True) < -1


def swapped(tables):
    return {"a": tables["b"].at[IDS].add(1), "b": tables["a"].at[IDS].set(NEW)}


def handed_on(tables):
    rows = tables["b"].at[IDS].add(1)
    return {"a": rows, "b": rows.at[IDS].set(NEW)}


def test_tables_that_change_places_keep_theirs():
    """Each becomes rows of the other: a refused scatter leaves the wrong one."""
    tables = {"a": odd_table(0), "b": odd_table(1)}
    changes = (swapped, handed_on)

    @jax.jit
    def run(accepted, tables):
        return [(update_if(accepted, f, tables), f(tables)) for f in changes]

    for accepted in (False, True):
        for found, changed in run(accepted, tables):
            expected = changed if accepted else tables
            for name, table in found.items():
                np.testing.assert_array_equal(bits(table), bits(expected[name]))


@pytest.mark.slow
def test_calls_are_counted_on_several_cpus_alone(monkeypatch):
    def metric_fn(params, batch, tower):
        return {"mean": tj.Weighted.mean(params * batch, tower.weight)}

    counted = []
    count = lambda cpus, *results: counted.append(cpus)  # noqa: E731
    monkeypatch.setattr(programs, "bound_in_flight", count)
    for cpus in (["cpu:0"], ["cpu:0", "cpu:1"]):
        step = tj.build_eval_step(metric_fn, tj.Mirrored(devices=cpus))
        step(np.float32(1), np.ones(16, np.float32))
    assert counted == [("cpu:0", "cpu:1")]


def of_several_threads():
    def loss_fn(params, batch, tower):
        return tj.Weighted.mean((params - batch) ** 2, tower.weight)

    def train():
        step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(), donate=False)
        state = step.init(np.zeros(64, np.float32))
        for _ in range(1000):
            state, metrics = step(state, np.ones((8, 64), np.float32))
        print(float(metrics["loss"]), flush=True)

    threads = [threading.Thread(target=train) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_threads_that_call_steps_of_the_same_devices_do_not_end_the_process():
    """XLA ends it after 40 s if programs of two threads hold all of its workers."""
    lines = forked.told(of_several_threads, devices=2).split()
    assert len(lines) == 8 and len(set(lines)) == 1
