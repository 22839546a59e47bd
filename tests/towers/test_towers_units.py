"""The functions of strategies, each by itself: names, few towers, owners of devices."""

import dataclasses
import types

import jax
import pytest
from jax.sharding import PartitionSpec as P

import towerjax as tj
from towerjax.mesh import placement
from towerjax.tf1.strategies import Verbs
from towerjax.towers.pick import pick_devices
from towerjax.towers.strategies import (
    METHODS_OF_TENSORFLOW,
    PROPERTIES_OF_TENSORFLOW,
    on_one_group,
)

SPECS = {"w1": P(None, "model"), "w2": P("model"), "b": None}


def own_names(cls):
    """The public names that are no option."""
    options = {field.name for field in dataclasses.fields(cls)}
    return {name for name in dir(cls) if name[0] != "_"} - options


def test_strategies_know_which_names_are_those_of_tensorflow():
    listed = {*METHODS_OF_TENSORFLOW, *PROPERTIES_OF_TENSORFLOW}
    with_verbs = tj.tf1.MirroredStrategy
    assert own_names(with_verbs) - own_names(tj.Mirrored) == listed
    assert own_names(tj.tf1.OneDeviceStrategy) - own_names(tj.OneDevice) == listed
    own = "distribute_dataset exact num_towers placement reduce unwrap worker_devices"
    assert own_names(tj.Mirrored) == {*own.split()}
    properties = {x for x in listed if isinstance(vars(Verbs)[x], property)}
    assert properties == {*PROPERTIES_OF_TENSORFLOW}


@pytest.mark.parametrize("name", [*METHODS_OF_TENSORFLOW, *PROPERTIES_OF_TENSORFLOW])
def test_a_name_of_tensorflow_says_which_strategy_has_it(name):
    kind = "property" if name in PROPERTIES_OF_TENSORFLOW else "method"
    pairs = [
        (tj.Mirrored(["cpu:0"], towers=2), "MirroredStrategy"),
        (tj.OneDevice("cpu:0"), "OneDeviceStrategy"),
    ]
    for plain, cls in pairs:
        with pytest.raises(AttributeError, match="has no attribute") as caught:
            getattr(plain, name)
        text = f"{name} is a {kind} of tj.tf1.{cls}: write strategy = tj.tf1.{cls}(...)"
        assert text in caught.value.__notes__[0]
        assert hasattr(tj.tf1.with_verbs(plain), name)


def test_a_strategy_of_few_towers_has_the_verbs_of_the_whole():
    strategy = tj.tf1.MirroredStrategy(["cpu:0"], towers=6, tower_loop="scan")
    one = tj.OneDevice("cpu:3")
    assert type(on_one_group(strategy, 2)) is tj.tf1.MirroredStrategy
    assert type(on_one_group(tj.tf1.with_verbs(one), 2)) is tj.tf1.MirroredStrategy
    assert type(on_one_group(one, 2)) is tj.Mirrored


@pytest.mark.parametrize("options", [{"tower_loop": "scan"}, {"axis_name": "batch"}])
def test_towers_of_several_devices_go_to_the_first_of_them(options):
    options |= {"within": {"model": 2}, "specs": SPECS, "rows": "model"}
    strategy = tj.Mirrored([f"cpu:{i}" for i in (4, 5, 6, 7)], **options)
    found = on_one_group(strategy, 2).placement
    expected = tj.Mirrored(["cpu:4", "cpu:5"], towers=2, **options).placement
    assert found == expected


@pytest.mark.parametrize("counts, towers, size, number", [
    ((2, 2, 2), 12, 1, 6),
    ((2, 2, 2), 4, 1, 4),  # the last process waits as a spare
    ((1, 1, 1), 4, 1, 2),
    ((3, 3), 4, 1, 4),  # two of each
    ((4, 4), 6, 2, 4),  # pairs of devices: three each would be six, but two fit
    ((3, 1), 7, 1, 1),
])  # fmt: skip
def test_the_most_devices_that_are_left_share_the_towers(counts, towers, size, number):
    of_each = {
        process: [f"{process}.{i}" for i in range(count)]
        for process, count in enumerate(counts)
    }
    chosen = pick_devices(of_each, towers, size, spares=True)
    assert len(chosen) == number and len({*chosen}) == number
    owners = [name[0] for name in chosen]
    assert owners == sorted(owners) and owners[0] == "0"
    assert len({owners.count(process) for process in owners}) == 1


def test_at_the_start_each_process_has_towers():
    of_each = {process: [f"cpu:{process}"] for process in range(3)}
    with pytest.raises(ValueError, match=r"towers=4 is not a .* 3 processes.*towers=6"):
        pick_devices(of_each, 4, 1)


def test_a_tower_is_of_one_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def devices(*owners):
        return tuple(types.SimpleNamespace(process_index=x) for x in owners)

    placement._check_owners(devices(0, 0, 1, 1), 2)
    with pytest.raises(ValueError, match=r"2 devices .* to the processes \[0, 1\]"):
        placement._check_owners(devices(0, 0, 0, 1), 2)
    with pytest.raises(ValueError, match="equally many devices of each, process"):
        placement._check_owners(devices(1, 0), 1)
    with pytest.raises(ValueError, match="equally many devices of each, process"):
        placement._check_owners(devices(0, 0, 1), 1)
