"""TensorFlow's verbs stand on the strategies of tj.tf1, and errors say so elsewhere."""

import pytest

import towerjax as tj


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
