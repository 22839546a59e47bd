"""The functions of devices and processes, each by itself: absent ones, signals."""

import contextlib
import importlib.metadata
import json
import logging
import os
import re
import signal
import threading
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import towerjax as tj
from towerjax.lowering.xla import compile_on_devices, lower_on_devices
from towerjax.mesh import absent, devices, live, processes
from towerjax.mesh.cluster import ends, leaving, start
from towerjax.mesh.cluster.spec import Cluster
from towerjax.mesh.interrupt import InterruptGuard, Terminated
from towerjax.mesh.peaks import peak_flops_of
from towerjax.mesh.transfer import _place_on_processes
from towerjax.step.run import programs
from towerjax.towers.executors import fingerprint_of_program

H200S = tj.Absent("h200", 8)
ONE = tj.Absent("h200", 1)


# Devices that are not here.


@pytest.mark.parametrize(
    "there, own", [(None, "cosine"), (H200S, "sine"), (tj.Absent("v5e:2x4"), "tanh")]
)
def test_a_program_is_lowered_for_the_platform_of_its_devices(there, own):
    codes = {"cpu": jnp.cos, "cuda": jnp.sin, "tpu": jnp.tanh}
    traced = jax.jit(lambda x: jax.lax.platform_dependent(x, **codes)).trace(1.0)
    placement = tj.Mirrored(there).placement
    lowered = lower_on_devices(traced, placement).as_text()
    assert re.findall(r"stablehlo\.(cosine|sine|tanh)", lowered) == [own]


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    def nothing(*args, **kwargs):
        if kwargs["platform"] == "tpu":
            raise RuntimeError("JAX TPU support not installed; cannot ...")
        raise NotImplementedError

    monkeypatch.setattr(absent.topologies, "get_topology_desc", nothing)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    for target, extra in (("h200", "gpu"), ("v5e:2x4", "tpu")):
        there = tj.Absent(target, None if extra == "tpu" else 1)
        install = rf"pip install '\.\[{extra}-compiler\]' in a checkout of towerjax"
        with pytest.raises(ValueError, match=install):
            there.jax_devices()


def test_a_product_that_fits_no_kernel_is_compiled_for_cublas():
    class Lowered:
        text = "the output tile sizes are too large"

        def compile(self, options=None):
            if options is None:
                raise jax.errors.JaxRuntimeError(self.text)
            return options

    placement = tj.Mirrored(devices=tj.Absent("h100", 1)).placement
    with pytest.warns(UserWarning, match="there is no GPU here to try others on"):
        found = compile_on_devices(Lowered(), placement)
    assert found == {"xla_gpu_enable_triton_gemm": False}
    Lowered.text = "no room"
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room"):
        compile_on_devices(Lowered(), placement)


def test_only_a_traceback_about_gpus_that_are_not_there_is_kept_back(monkeypatch):
    def record(name, failed):
        info = (ValueError, ValueError(), None) if failed else None
        text = "Exception when calling %s.initialize()"
        return logging.LogRecord("", logging.ERROR, "", 1, text, (name,), info)

    for gpus in ([], ["/dev/nvidia0"]):
        monkeypatch.setattr(absent.glob, "glob", lambda _, gpus=gpus: gpus)
        for name in ("jax_plugins.xla_cuda13", "jax_plugins.other"):
            for failed in (True, False):
                kept_back = not gpus and failed and "cuda" in name
                filters = logging.getLogger("jax._src.xla_bridge").filters
                ours = [f for f in filters if f.__module__ == absent.__name__]
                assert ours[0](record(name, failed)) == (not kept_back)


def test_a_program_on_the_disk_that_jax_cannot_read_is_compiled_without_a_word():
    """With ``jax_compilation_cache_dir``: JAX wants devices to read what it wrote."""

    class Lowered:
        def compile(self):
            warnings.warn(
                "Error reading persistent compilation cache entry", stacklevel=1
            )
            return "compiled"

    absent_ones = tj.Mirrored(devices=ONE).placement
    assert compile_on_devices(Lowered(), absent_ones) == "compiled"
    with pytest.warns(UserWarning, match="Error reading"):
        compile_on_devices(Lowered(), tj.Mirrored(("cpu:0",)).placement)


PEAKS = {  # bfloat16, dense
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100": 312e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "v5e:2x4": 197e12,
    "v5p:2x2x1": 459e12,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,  # a part of one
    "TPU v4 lite": None,
    "TPU v3": None,
    "NVIDIA A10": None,
    "cpu": None,
}


def test_the_peak_of_a_device_is_known_by_its_kind():
    assert {kind: peak_flops_of(kind) for kind in PEAKS} == PEAKS


# Calls in flight, and signals.


def test_of_calls_on_several_cpus_at_most_sixteen_are_in_flight(monkeypatch):
    class Result:
        ran = is_gone = fails = False

        def is_deleted(self):
            return self.is_gone

        def is_ready(self):
            return self.ran

        def block_until_ready(self):
            waited.append(calls.index(self))
            self.ran = not self.is_gone
            if self.is_gone or self.fails:
                raise RuntimeError

    def call(number, cpus="cpu:0 cpu:1"):
        results = {"first": calls[number], "of the host": 1.0, "next": Result()}
        devices.bound_in_flight(tuple(cpus.split()), 0, results)

    def kept():
        return [calls.index(x) for x in running["cpu:0", "cpu:1"]]

    calls = [Result() for _ in range(22)]
    waited = []
    running = {}
    monkeypatch.setattr(devices, "DeviceArray", Result)
    monkeypatch.setattr(devices, "_RUNNING", running)
    for number in range(16):
        call(number)
    call(21, "cpu:2 cpu:3")
    assert waited == [] and kept() == [*range(16)]
    call(16)
    assert waited == [0] and kept() == [*range(1, 17)]
    calls[1].is_gone = True  # a later step took it
    calls[4].ran = True  # as a call of one device may have, in another order
    call(17)
    assert waited == [0, 1, 2] and kept() == [3, *range(4, 18)]
    calls[3].ran = True
    call(18)
    assert waited == [0, 1, 2] and kept() == [*range(5, 19)]
    calls[5].fails = True  # which is for who asks for its results
    call(19), call(20)
    assert waited == [0, 1, 2] and kept() == [*range(5, 21)]
    calls.append(Result())
    call(22)
    assert waited == [0, 1, 2, 5] and kept() == [*range(6, 21), 22]


def test_a_second_ctrl_c_waits_as_the_first():
    guard = InterruptGuard()
    finished = []

    def pressed_three_times():
        with guard:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
            finished.append(True)

    with pytest.raises(KeyboardInterrupt):
        guard.call(pressed_three_times)
    assert finished


def test_sigterm_is_held_back_while_results_are_read_and_not_after():
    guard = InterruptGuard(7)
    seen = []

    def read():
        for number in range(2):
            with guard.holding_sigterm():
                if number:
                    signal.raise_signal(signal.SIGTERM)
                seen.append(number)
        seen.append("after")

    with pytest.raises(Terminated):
        guard.call(read)
    assert seen == [0, 1]


# Several processes.


def of_an_array(value):
    table = np.append(np.zeros(5000, np.float32), np.float32(value))
    return lambda x: jax.lax.fori_loop(0, 2, lambda i, x: x * jnp.asarray(table), x)


def of_keys(value):
    keys = jax.random.split(jax.random.key(value), 5001)
    return lambda x: x * jax.vmap(jax.random.uniform)(keys)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("simplified", [False, True])
@pytest.mark.parametrize("closing_over", [of_an_array, of_keys])
def test_what_a_function_closes_over_is_compared(simplified, closing_over):
    # Where JAX starts with simplified constants, a program's text has no values.
    lowered = SimpleNamespace(as_text=lambda: "a function of arrays")

    def shown(value):
        traced = jax.jit(closing_over(value)).trace(jnp.ones(5001))
        return fingerprint_of_program(traced, lowered)

    before = jax.config.jax_use_simplified_jaxpr_constants
    jax.config.update("jax_use_simplified_jaxpr_constants", simplified)
    try:
        assert shown(1) == shown(1) != shown(2)
    finally:
        jax.config.update("jax_use_simplified_jaxpr_constants", before)


def test_keys_are_placed_by_one_program(compiled):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for key in map(jax.random.key, range(3)):
        placed = _place_on_processes(key, sharding)
        assert (jax.random.key_data(placed) == jax.random.key_data(key)).all()
    assert compiled.count("jit(wrap_key_data)") <= 1


def test_one_line_tells_of_a_peer_that_is_late(monkeypatch, capfd):
    class Client:
        """Of the coordinator: the other's value comes in the 13th second."""

        asked = 0
        key_value_set = staticmethod(lambda key, value: None)

        def blocking_key_value_get(self, key, milliseconds):
            assert milliseconds == 1000
            self.asked += 1
            if self.asked < 13:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out")
            assert key.endswith("/all")
            return json.dumps({0: ["0"], 1: "one"})

    monkeypatch.setattr(processes, "coordinator_client", Client)
    stopped = threading.Event()
    exchange = processes.Exchange("data", "a batch of process {}", [1, 0], stopped)
    assert exchange.all_gather(["0"]) == ["one", ["0"]]
    text = "towerjax: process 0 waits for a batch of process 1\n"
    assert capfd.readouterr().err == text
    stopped.set()
    with pytest.raises(processes.Stopped):
        exchange.all_gather(["0"])


def of_processes(*owners):
    """The processes of devices that only say whose they are."""
    devices = [SimpleNamespace(process_index=x) for x in owners]
    return processes.Processes(tuple(devices))


def test_the_processes_are_those_of_the_devices():
    assert of_processes(0, 0, 2, 2).numbers == (0, 2)
    assert of_processes(0, 2).are_several and not of_processes(2, 2).are_several
    assert of_processes().is_first and of_processes(0, 2).is_first
    assert not of_processes(1, 2).is_first


def test_a_value_is_sent_bit_by_bit():
    """As a number, -0 plus 0 is 0, and a NaN need not stay the same."""
    values = [-0.0, np.inf, 1e-45, 3.0]
    for x in (
        np.array(values, np.float32),
        np.array([0x7FC12345], np.uint32).view(np.float32),
        np.array(True),
        np.zeros((0, 3)),
        np.array(values[:3]).astype(jnp.bfloat16),
    ):
        rows = np.stack([processes._words_of(y) for y in (x, np.zeros_like(x))])
        added = np.array(rows.sum(axis=0, dtype=rows.dtype))
        back = added.view(x.dtype).reshape(x.shape)
        assert back.tobytes() == x.tobytes() and back.dtype == x.dtype


# Processes that leave their job.


FIRST = Cluster(0, 2, "127.0.0.1:1", "a test")


class Store:
    """The key-value store of a job whose other process left after ``calls`` calls."""

    def __init__(self, calls):
        one = leaving.Left(1, calls, calls, waits=False)
        self.texts = {"towerjax/left/1": json.dumps(vars(one))}

    def blocking_key_value_get(self, key, milliseconds):
        if not self.texts:
            raise processes.StoreError("DEADLINE_EXCEEDED: nobody has left")
        return ""

    def key_value_set(self, key, text, allow_overwrite=False):
        self.texts[key] = text

    def key_value_dir_get(self, folder):
        return [(k, x) for k, x in self.texts.items() if k.startswith(f"{folder}/")]


@pytest.fixture
def two_processes(monkeypatch):
    """As if this were process 0 of two; returns the codes that it ends with."""
    codes = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "begun", SimpleNamespace(calls=2, steps=2))
    monkeypatch.setattr(leaving, "begun", processes.begun)
    monkeypatch.setattr(leaving, "_LOOK_S", 0.001)
    monkeypatch.setattr(leaving, "_PATIENCE_S", 0.01)

    def end_now(code):
        codes.append(code)
        raise processes.StoreError("ended")

    monkeypatch.setattr(ends, "end_now", end_now)
    return codes


@pytest.mark.parametrize("there, code", [(2, [1]), (3, []), (4, [])])
def test_only_who_made_more_calls_waits_in_vain(two_processes, there, code):
    """Calls are steps, and the other calls that all processes make."""
    both = processes.Processes(tuple(SimpleNamespace(process_index=i) for i in (0, 1)))
    with both.says_if_alone("a test"):
        one = leaving.Leaving(Store(there), FIRST, "process 0 of 2", 300)
        one._thread.join(0.05)
        assert two_processes == code
        one.leave()


def test_a_call_that_raises_is_no_step(monkeypatch):
    """It may be repeated."""
    begun = SimpleNamespace(calls=0, steps=0)
    monkeypatch.setattr(programs, "begun", begun)
    step = tj.build_predict_step(lambda params, x, tower: x * params, tj.OneDevice())
    rows = step.place_batch(np.ones(2, np.float32))
    for call, error, calls in ((len, TypeError, 0), (list, None, 1)):
        program = SimpleNamespace(call=lambda *x, call=call: call(x[0]))
        with pytest.raises(error) if error else contextlib.nullcontext():
            step.programs(program, (0,) if error else ([0],), rows)
        assert (begun.calls, begun.steps) == (calls, calls)


def test_the_others_are_waited_for_up_to_the_timeout(two_processes, capsys):
    store = Store(0)
    store.texts.clear()
    one = leaving.Leaving(store, FIRST, "process 0 of 2", 0.02)
    one.leave()
    assert two_processes == [1]
    assert "process 0 of 2 ends: the others did not end within 0.02 s" in (
        capsys.readouterr().err
    )


def test_a_lost_process_is_left_out_of_an_answer(monkeypatch):
    """The first one collects: it waits for all that may still answer.

    Process 3 has answered while it waited for process 1.
    """

    class Client:
        told = {}

        def key_value_dir_get(self, folder):
            return [(f"{folder}/3", json.dumps("three"))]

        def key_value_set(self, key, value):
            self.told[key.rpartition("/")[2]] = value

        def blocking_key_value_get(self, key, milliseconds):
            if key.endswith("/2"):
                return json.dumps("two")
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out")

    monkeypatch.setattr(processes, "coordinator_client", Client)
    monkeypatch.setattr(live._job, "silent", frozenset([1]))
    exchange = processes.Exchange("data", "process {}", [0, 1, 2, 3])
    told = {0: "zero", 2: "two", 3: "three"}
    assert exchange.gather_from_left("zero") == told
    assert json.loads(Client.told["all"]) == {str(k): x for k, x in told.items()}
    with pytest.raises(live.LostError, match="process 1 was lost"):
        exchange.all_gather("zero")


def test_processes_that_are_left_out_stay_so(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(live._job, "left_out", frozenset())
    live.leave_out([3])
    live.leave_out([1])
    assert live.numbers_left() == (0, 2) and live.silent() == {1, 3}
    assert live.named([1]) == "process 1 was"
    assert live.named([3, 0, 1]) == "processes 0, 1 and 3 were"


FLAG = "--xla_cpu_collective_timeout_seconds"


@pytest.mark.parametrize("given, asked, flags", [
    ("", None, f"{FLAG}=30"),
    ("--a=1", 7, f"--a=1 {FLAG}=7"),
    (f"{FLAG}=5", None, f"{FLAG}=5"),
    (f"{FLAG}=5 --a=1", 7, f"--a=1 {FLAG}=7"),
])  # fmt: skip
def test_a_recoverable_job_bounds_its_collectives(given, asked, flags, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    set_there = {}
    config = SimpleNamespace(update=set_there.__setitem__)
    monkeypatch.setattr(jax, "config", config)
    start._make_recoverable(asked)
    assert os.environ["XLA_FLAGS"] == flags
    assert set_there["jax_enable_recoverability"] is True
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"before jax\.distributed\.initialize\(\)"):
        start._make_recoverable(asked)
