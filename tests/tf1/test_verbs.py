"""TensorFlow's verbs stand on the strategies of tj.tf1, and errors say so elsewhere."""

import dataclasses

import pytest

import towerjax as tj
from towerjax.tf1.strategies import Verbs
from towerjax.towers.methods import METHODS_OF_TENSORFLOW, PROPERTIES_OF_TENSORFLOW
from towerjax.towers.strategies import on_one_group


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


def test_a_strategy_with_verbs_has_the_options_of_the_one_without():
    plain = tj.Mirrored(["cpu:0"], towers=6, tower_loop="scan", state="sharded")
    strategy = tj.tf1.with_verbs(plain)
    assert type(strategy) is tj.tf1.MirroredStrategy and strategy != plain
    assert strategy == tj.tf1.MirroredStrategy(**plain.__getstate__())
    assert strategy.placement == plain.placement
    assert tj.tf1.with_verbs(strategy) is strategy
    one = tj.OneDevice("cpu:3")
    assert tj.tf1.with_verbs(one) == tj.tf1.OneDeviceStrategy("cpu:3")
    with pytest.raises(ValueError, match="with_verbs: strategy is an int"):
        tj.tf1.with_verbs(4)
    # Of a few towers, and of one, it has the verbs, too.
    assert type(on_one_group(strategy, 2)) is tj.tf1.MirroredStrategy
    assert type(on_one_group(tj.tf1.with_verbs(one), 2)) is tj.tf1.MirroredStrategy
    assert type(on_one_group(one, 2)) is tj.Mirrored
