"""Strategies: plain values that check themselves, print themselves and name devices."""

import collections
import copy
import dataclasses
import pickle
import warnings

import jax
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.contrib import DiLoCo

CPUS = jax.devices("cpu")
FOUR = tuple(f"cpu:{i}" for i in range(4))

# Options, and the text that pastes back: only what differs from the defaults.
STRATEGIES = [
    (tj.Mirrored(), "Mirrored()"),
    (tj.Mirrored(devices=("gpu:0",)), "Mirrored(devices=('gpu:0',))"),
    (tj.Mirrored(num_gpus=0), "Mirrored(num_gpus=0)"),  # 0 is no default
    (tj.Mirrored(num_gpus=2), "Mirrored(num_gpus=2)"),
    (tj.Mirrored(num_gpus_per_worker=3), "Mirrored(num_gpus_per_worker=3)"),
    (tj.Mirrored(num_gpus=2, towers=6), "Mirrored(num_gpus=2, towers=6)"),
    (tj.Mirrored(towers=4096), "Mirrored(towers=4096)"),
    (tj.Mirrored(devices=FOUR, towers=12), f"Mirrored(devices={FOUR}, towers=12)"),
    (tj.Mirrored(tower_loop="scan"), "Mirrored(tower_loop='scan')"),
    (tj.Mirrored(executor="pmap"), "Mirrored(executor='pmap')"),
    (tj.Mirrored(towers=8, tower_loop="scan", cross_tower_ops=tj.PinnedTree()),
        "Mirrored(towers=8, tower_loop='scan', cross_tower_ops=PinnedTree())"),
    (tj.Mirrored(cross_tower_ops=tj.AllReduce(pack_below_bytes=0)),
        "Mirrored(cross_tower_ops=AllReduce(pack_below_bytes=0))"),
    (tj.Mirrored(cross_tower_ops=tj.AllReduce()), "Mirrored()"),
    (tj.OneDevice(), "OneDevice()"),
    (tj.OneDevice("CUDA:1"), "OneDevice(device='gpu:1')"),
]  # fmt: skip


@pytest.mark.parametrize("strategy, text", STRATEGIES, ids=[t for _, t in STRATEGIES])
def test_text_pastes_back_as_an_equal_object(strategy, text):
    assert repr(strategy) == text
    again = eval(text, vars(tj))
    assert again == strategy and again is not strategy
    assert hash(again) == hash(strategy)


def test_different_options_are_different_objects():
    different = {strategy for strategy, _ in STRATEGIES}
    assert len(different) == len(STRATEGIES) - 1  # AllReduce() is the default


@pytest.mark.parametrize("strategy", [tj.Mirrored(), tj.OneDevice()])
def test_strategies_are_frozen(strategy):
    for field in dataclasses.fields(strategy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(strategy, field.name, None)


@pytest.mark.parametrize(
    "strategy", [tj.Mirrored(devices=FOUR, towers=8), tj.OneDevice("cpu:1")]
)
def test_a_used_strategy_can_be_copied_and_pickled(strategy):
    used = copy.copy(strategy)
    assert used.placement.mesh.size == len(used.worker_devices)  # looked up: Devices
    for again in (copy.deepcopy(used), pickle.loads(pickle.dumps(used))):
        assert again == used and repr(again) == repr(used)
        assert again.placement.jax_devices == used.placement.jax_devices


def test_replacing_an_option_checks_it_again():
    strategy = tj.Mirrored(devices=FOUR, towers=8)
    assert dataclasses.replace(strategy, towers=4).num_towers == 4
    with pytest.raises(ValueError, match="towers=6 is not a multiple of the 4"):
        dataclasses.replace(strategy, towers=6)


@pytest.mark.parametrize("written", [
    *("gpu:0", "GPU:0", "cuda:0", "CUDA:0", "rocm:0", "/gpu:0", "/device:GPU:0"),
    "/job:localhost/replica:0/task:0/device:GPU:0",
    "/job:localhost/replica:0/task:0/gpu:0",
])  # fmt: skip
def test_spellings_of_one_device_are_one_device(written):
    assert tj.Mirrored(devices=(written,)) == tj.Mirrored(devices=("gpu:0",))
    with pytest.raises(ValueError, match="devices names gpu:0 more than once in"):
        tj.Mirrored(devices=("gpu:1", "gpu:0", written))


def test_device_objects_and_names_are_the_same():
    by_object = tj.Mirrored(devices=[CPUS[2], CPUS[0]])
    assert by_object == tj.Mirrored(devices=("CPU:2", "cpu:0"))
    assert by_object.devices == ("cpu:2", "cpu:0")  # a tuple: hashable
    assert tj.OneDevice(CPUS[3]) == tj.OneDevice("/device:CPU:3")
    with pytest.raises(ValueError, match="devices names cpu:2 more than once"):
        tj.Mirrored(devices=(CPUS[2], "cpu:2"))


def test_a_list_of_a_configuration_names_devices():
    """As OmegaConf's ListConfig is one, which is neither a tuple nor a list."""
    given = collections.UserList(["cpu:2", "cpu:1"])
    assert tj.tf1.MirroredStrategy(devices=given) == tj.tf1.MirroredStrategy(
        devices=("cpu:2", "cpu:1")
    )
    value = tj.tf1.MirroredStrategy().broadcast(
        np.float32(1), collections.UserList(["cpu:2"])
    )
    assert [device.id for device in value.devices()] == [2]


# What was written, and what the error says.
BAD = [
    (dict(devices=("cpu:0", "cpu:1", "cpu:0")),
        "devices names cpu:0 more than once in ('cpu:0', 'cpu:1', 'cpu:0'). For several"
        " towers on a device write towers=... instead."),
    (dict(devices=("cpu:1", "cpu:01")), "devices names cpu:1 more than once"),
    (dict(devices=()), "devices=() must be a tuple of names or of jax.Device"),
    (dict(devices="gpu:0"),
        "devices='gpu:0' must be a tuple of names or of jax.Device objects, such as"
        " devices=('gpu:0',);"),
    (dict(devices={"cpu:0"}), "such as devices=('gpu:0',);"),  # unordered
    (dict(devices=2), "For a number of towers write towers=8."),
    (dict(devices=("gpu",)),
        "'gpu' is not a device name. Write 'platform:index', such as 'gpu:0' or"
        " 'cpu:3', or pass a jax.Device."),
    (dict(devices=("gpu:-1",)), "'gpu:-1' is not a device name"),
    (dict(devices=(0, 1)), "devices: 0 is not a device name"),
    (dict(devices=("/job:worker/task:0/gpu:0",)), "is not a device name"),
    # Of another process: gpu:0 would be another device.
    (dict(devices=("/job:localhost/task:1/gpu:0",)), "is not a device name"),
    (dict(devices=("gpu:0", "cpu:0")),
        "devices are of several platforms, cpu and gpu, in ('gpu:0', 'cpu:0'), but"
        " one program runs on one platform. Name devices of one platform."),
    (dict(num_gpus=2, num_gpus_per_worker=2), "devices, num_gpus and num_gpus_per_wor"),
    (dict(devices=("gpu:0",), num_gpus=1), "exclude each other. Give one of them."),
    (dict(devices=FOUR, towers=6),
        "towers=6 is not a multiple of the 4 devices, so they cannot share the towers"
        " evenly. Use towers=4 or 8, or another number of devices."),
    (dict(num_gpus=2, towers=3), "towers=3 is not a multiple of the 2 devices"),
    (dict(num_gpus_per_worker=4, towers=9), "Use towers=8 or 12, or another"),
    (dict(tower_loop="pmap"), "tower_loop='pmap' must be one of 'vmap', 'scan'."),
    (dict(cross_tower_ops="nccl"),
        "cross_tower_ops='nccl' is not a cross-tower op; write tj.AllReduce(),"
        " tj.PinnedTree(), or tj.collectives.Packed() and the like."),
    (dict(cross_tower_ops=tj.PinnedTree), "is not a cross-tower op; write tj.AllRed"),
]  # fmt: skip


@pytest.mark.parametrize("options, text", BAD, ids=[str(o) for o, _ in BAD])
def test_bad_options_say_what_to_write(options, text):
    with pytest.raises(ValueError) as error:
        tj.Mirrored(**options)
    assert text in str(error.value)


def test_one_device_refuses_what_is_no_name():
    with pytest.raises(ValueError, match=r"\('cpu:0',\) is not a device name"):
        tj.OneDevice(("cpu:0",))


# Devices that this machine does not have: a strategy may still be written down.


def build(strategy):
    def loss_fn(w, batch, tower):
        raise AssertionError("traced, although a device is missing")

    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)


MISSING = [
    (
        tj.Mirrored(devices=[f"cpu:{i}" for i in range(9)]),
        "'cpu:8' is not on this",
    ),
    (
        tj.Mirrored(devices=[f"cpu:{i}" for i in range(12)]),
        "'jax_num_cpu_devices', 12",
    ),
    (
        tj.Mirrored(devices=("cpu:0", "cpu:11")),
        "'jax_num_cpu_devices', 12) before",
    ),
    (
        tj.Mirrored(devices=("tpu:0",)),
        "'tpu:0' is not on this machine, which has 0 of",
    ),
    (
        tj.OneDevice("tpu:7"),
        "Name devices that it has, or write towers=...",
    ),
]


@pytest.mark.parametrize("strategy, text", MISSING, ids=[t for _, t in MISSING])
def test_missing_devices_are_named_before_anything_is_traced(strategy, text):
    assert strategy.num_towers == len(strategy.worker_devices)  # known without devices
    step = build(strategy)
    elsewhere = build(tj.tf1.OneDeviceStrategy("cpu:0")).init(np.float32(1))
    batch = np.ones(2 * strategy.num_towers, np.float32)
    for use in (
        lambda: step.init(np.float32(1)),
        lambda: step(elsewhere, batch),
        lambda: tj.tf1.with_verbs(strategy).call_for_each_tower(lambda tower: tower.id),
    ):
        with pytest.raises(ValueError) as error:
            use()
        assert text in str(error.value)


def test_all_devices_by_default():
    here = jax.local_devices()
    strategy = tj.tf1.MirroredStrategy()
    assert strategy.num_towers == len(here)
    assert strategy.placement.jax_devices == tuple(here)
    assert strategy.parameter_devices == strategy.worker_devices
    assert not strategy.is_single_tower or len(here) == 1
    assert tj.tf1.OneDeviceStrategy().placement.jax_devices == (here[0],)


@pytest.mark.parametrize("use", [
    lambda: tj.tf1.MirroredStrategy(num_gpus=0).placement.jax_devices,
    lambda: tj.tf1.MirroredStrategy(devices=["cpu:0"]).placement.jax_devices,
    lambda: tj.tf1.MirroredStrategy().fetch(1.0),
], ids=["num_gpus", "name", "fetch"])  # fmt: skip
def test_where_jax_leaves_cpus_out_it_says_so(use, monkeypatch):
    def only_gpus(backend=None, **options):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return here

    here = jax.devices()
    monkeypatch.setattr(jax, "devices", only_gpus)
    monkeypatch.setattr(jax, "local_devices", only_gpus)
    with pytest.raises(ValueError, match="Add cpu to it, as in JAX_PLATFORMS="):
        use()


@pytest.mark.parametrize("options, devices, towers", [
    ({"num_gpus": 3, "towers": 6}, ("gpu:0", "gpu:1", "gpu:2"), 6),
    ({"num_gpus_per_worker": 2}, ("gpu:0", "gpu:1"), 2),
    ({"num_gpus": 0}, ("cpu:0",), 1),  # no GPUs are the CPU
    ({"num_gpus": 0, "towers": 5}, ("cpu:0",), 5),
])  # fmt: skip
def test_a_count_of_gpus_is_the_first_ones(options, devices, towers):
    strategy = tj.tf1.MirroredStrategy(**options)
    assert strategy.worker_devices == devices and strategy.num_towers == towers
    assert strategy.is_single_tower == (towers == 1)


eight_devices = pytest.mark.skipif(
    len(jax.local_devices()) != 8, reason="counts on 8 default devices"
)


@eight_devices
@pytest.mark.parametrize(
    "towers, used", [(16, 8), (6, 6), (5, 5), (12, 6), (9, 3), (11, 1)]
)
def test_as_many_devices_as_divide_the_towers(towers, used):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy = tj.Mirrored(towers=towers)
        assert strategy.num_towers == towers
        assert len(strategy.worker_devices) == used


@pytest.mark.parametrize("executor", ["shard_map", "pmap"])
def test_towers_lie_in_order_and_mirrored_values_on_every_device(executor):
    devices = [f"cpu:{i}" for i in (5, 1, 3)]
    strategy = tj.tf1.MirroredStrategy(devices=devices, towers=6, executor=executor)
    ids, total = strategy.call_for_each_tower(
        lambda tower: (tower.id, tower.reduce(tj.Reduction.SUM, tower.id))
    )
    for x, parts in ((ids.values, [[0, 1], [2, 3], [4, 5]]), (total, [15] * 3)):
        found = {shard.device: shard.data.tolist() for shard in x.addressable_shards}
        assert found == dict(zip([CPUS[i] for i in (5, 1, 3)], parts, strict=True))


def test_a_placement_has_each_option_of_its_strategy():
    options = {"axis_name": "batch", "executor": "pmap"}
    place = tj.Mirrored(devices=FOUR, towers=8, **options).placement
    assert {name: getattr(place, name) for name in options} == options
    assert (place.devices, place.num_towers, place.shard_run) == (FOUR, 8, 1)
    options = {"tower_loop": "scan", "within": (("model", 2),), "rows": "model"}
    others = {"specs": {"w": jax.P("model")}, "cross_tower_ops": tj.PinnedTree()}
    place = tj.Mirrored(devices=FOUR, **options, **others).placement
    assert {name: getattr(place, name) for name in options} == options
    assert place.num_towers == 2 and place.shard_run > 1
    assert place.specs is not None and place.absent is None
    absent = tj.Absent("a100", 2)
    assert tj.Mirrored(devices=absent).placement.absent == absent
    one = tj.OneDevice("cpu:5", axis_name="batch").placement
    assert (one.devices, one.num_towers, one.axis_name) == (("cpu:5",), 1, "batch")


def test_one_device_lies_where_it_says():
    strategy = tj.tf1.OneDeviceStrategy("cpu:5")
    ids = strategy.call_for_each_tower(lambda tower: tower.id)
    assert ids.values.devices() == {CPUS[5]}
    assert strategy.num_towers == 1 and strategy.is_single_tower
    assert strategy.worker_device_index.values.tolist() == [0]


def test_numbers_of_numpy_become_those_of_python():
    """16 times 16 of ``np.int8`` is 0, and 128 is no such number."""

    def loss_fn(w, x, tower):
        return tj.Weighted.mean((w - x) ** 2, tower.weight)

    n = np.int8(16)
    step = tj.build_train_step(
        loss_fn,
        optax.sgd(0.5),
        tj.Mirrored(devices=FOUR[:1], towers=n),
        micro_batches=n,
        remainder="pad",
    )
    placed = step.place_batch(np.ones(200, np.float32))
    assert placed.num_examples == 200
    for options in (
        step.strategy,
        step.options,
        tj.Checkpointer("folder", every=n),
        tj.loop.WithState(print, every=n),
        DiLoCo(every=n, overlap=np.int8(1)),
    ):
        assert not any(isinstance(x, np.integer) for x in vars(options).values())


@pytest.mark.slow
def test_ipython_completes_a_strategy_with_its_own_words():
    completer = pytest.importorskip("IPython.core.completer")
    names = {"strategy": tj.Mirrored(["cpu:0"], towers=2)}
    complete = completer.IPCompleter(namespace=names, use_jedi=True)
    with completer.provisionalcompleter():
        found = [x.text for x in complete.completions("strategy.", 9)]
    assert "within" in found and "num_towers" in found
    assert "assign" not in found and len(found) < 30
