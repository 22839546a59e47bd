"""What programs of others are given, on any number of devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import towerjax as tj

ROWS = np.arange(24.0).reshape(8, 3)


@pytest.mark.slow
def test_each_device_has_a_copy():
    made = tj.testing.copies({"w": ROWS, "step": 3}, jax.devices()[:4])
    np.testing.assert_array_equal(made["w"], np.stack([ROWS] * 4))
    assert made["step"].tolist() == [3] * 4
    assert made["w"].sharding.device_set == {*jax.devices()[:4]}


def test_each_device_has_its_rows():
    made = tj.testing.parts({"x": ROWS}, jax.devices()[:4])
    np.testing.assert_array_equal(made["x"], ROWS.reshape(4, 2, 3))
    for wrong in (ROWS, np.float32(1)):
        with pytest.raises(ValueError, match="that 5 devices can share evenly"):
            tj.testing.parts(wrong, jax.devices()[:5])


def test_arrays_lie_on_the_devices():
    devices = jax.devices()[:2]
    whole = tj.testing.placed(ROWS, devices)
    split = tj.testing.placed(ROWS, devices, "rows")
    assert whole.sharding.is_fully_replicated and split.sharding.spec == P("rows")
    assert [x.data.shape for x in split.addressable_shards] == [(4, 3)] * 2
    np.testing.assert_array_equal(whole, split)


def test_what_is_no_array_stays():
    tree = {"w": ROWS, "activation": np.tanh}
    devices = jax.devices()[:2]
    shapes = {tj.testing.copies: (2, 8, 3), tj.testing.parts: (2, 4, 3)}
    for given, shape in (shapes | {tj.testing.placed: (8, 3)}).items():
        made = given(tree, devices)
        assert made["activation"] is np.tanh and made["w"].shape == shape
