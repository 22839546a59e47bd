"""distribute_dataset: what each tower gets of what may be fed, and how data ends."""

import collections
import itertools
import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import with_verbs as mirrored

import towerjax as tj

LAYOUTS = pytest.mark.parametrize("T, D", [(4, 2), (3, 1), (1, 1)])


def data(rows):
    x = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    return {"x": x, "y": x.sum(-1) + 1}


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight)


def examples_of(placed):
    """Each tower's examples, without its padding."""
    np.testing.assert_array_equal(placed.args[1], placed.counts)  # as towers are told
    per_tower = jax.tree.map(
        lambda v: np.asarray(v.values),
        placed.per_tower(),
        is_leaf=lambda v: isinstance(v, tj.PerTower),
    )
    return [
        jax.tree.map(lambda x, t=t, n=n: x[t][:n].tolist(), per_tower)
        for t, n in enumerate(placed.counts)
    ]


# Whole batches, split over the towers.


@pytest.mark.few_fast(1)
@LAYOUTS
def test_global_batches_are_split_in_order_and_none_is_lost(T, D):
    dataset = mirrored(T, D).distribute_dataset(tj.batches(np.arange(23), 7))
    steps = [list(itertools.chain(*examples_of(placed))) for placed in dataset]
    assert steps == [list(range(i, min(i + 7, 23))) for i in range(0, 23, 7)]


@pytest.mark.slow
def test_a_distributed_data_set_trains_to_the_bits_of_its_batches():
    strategy = mirrored(4, 2)
    step = tj.build_train_step(loss_fn, optax.sgd(1e-3), strategy, remainder="pad")

    def trained(batches):
        state = step.init(jnp.zeros(2))
        state, history = tj.run(step, state, batches, progress=False)
        assert history.summary.examples == 100
        return np.asarray(state.params)

    batches = list(tj.batches(data(50), 13, epochs=2, seed=0))
    expected = trained(batches)
    assert abs(expected).min() > 1e-3
    distributed = strategy.distribute_dataset(batches)
    np.testing.assert_array_equal(trained(distributed), expected)


@pytest.mark.parametrize(
    "remainder, expected",
    [("pad", [8, 8, 3]), ("drop", [8, 8])],  # 3 rows are too few for 4 towers
)
def test_the_remainder_of_the_data(remainder, expected):
    dataset = mirrored(4).distribute_dataset(
        tj.batches(np.arange(19), 8), remainder=remainder
    )
    assert [placed.num_examples for placed in dataset] == expected


@pytest.mark.slow
def test_micro_batches_divide_a_towers_rows():
    strategy = mirrored(2)
    step = tj.build_train_step(loss_fn, optax.sgd(1e-3), strategy, micro_batches=3)
    (good,) = strategy.distribute_dataset([data(8)], micro_batches=3)
    assert good.rows == 6 and good.counts.tolist() == [6, 2]
    (bad,) = strategy.distribute_dataset([data(8)])
    state, metrics = step(step.init(jnp.ones(2)), good)
    assert float(metrics["loss"]) == 1.0  # x . 1 - y = -1
    with pytest.raises(ValueError, match="gives each tower 4 rows, which 3 micro"):
        step(state, bad)


# One element a tower.


@pytest.mark.few_fast(1)
@LAYOUTS
def test_each_tower_takes_an_element(T, D):
    strategy = mirrored(T, D)
    elements = [data(5 + i) for i in range(2 * T)]
    dataset = strategy.distribute_dataset(elements, split="elements")
    for i, placed in enumerate(dataset):
        for t, seen in enumerate(examples_of(placed)):
            given = elements[i * T + t]
            assert seen == {name: x.tolist() for name, x in given.items()}
    assert i == 1


@pytest.mark.parametrize("towers, sizes, options, expected", [
    (3, [2] * 5, {"remainder": "pad"}, [[2, 2, 2], [2, 2, 0]]),
    (3, [2] * 5, {"remainder": "drop"}, [[2, 2, 2]]),
    (3, [2] * 5, {"remainder": "error"}, r"2 elements of sizes \[2, 2\].*'drop' to"),
    (2, [4, 4, 4, 2], {"remainder": "drop"}, [[4, 4]]),  # a short last one
    (2, [4, 4, 3], {"remainder": "drop"}, [[4, 4]]),
    (2, [4, 2, 4, 4], {"remainder": "drop"}, r"2 towers take .* of sizes \[4, 2\]"),
    (2, [4, 5], {"micro_batches": 3}, [[4, 5]]),
    (2, [5, 5], {"micro_batches": 2, "remainder": "drop"}, [[4, 4]]),
    (2, [3, 3], {"micro_batches": 2, "remainder": "error"}, "Use a multiple of 2"),
    (2, [1, 1], {"micro_batches": 2, "remainder": "drop"}, "leaves nothing of"),
])  # fmt: skip
def test_elements_left_over_and_of_unequal_size(towers, sizes, options, expected):
    dataset = mirrored(towers).distribute_dataset(
        lambda: map(np.arange, sizes), split="elements", **options
    )
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            list(dataset)
        return
    placed = list(dataset)
    assert [each.counts.tolist() for each in placed] == expected
    assert placed[0].rows % options.get("micro_batches", 1) == 0
    assert placed[0].padded == (placed[0].rows > min(expected[0]))
    assert options.get("remainder", "pad") == "pad" or not placed[0].padded


def test_elements_of_two_kinds_are_refused():
    elements = [np.zeros((2, 3)), np.zeros((2, 4))]
    dataset = mirrored(2).distribute_dataset(elements, split="elements")
    with pytest.raises(
        ValueError, match=r"Tower 1's element .* is .*, expected float32\[1, 3\]"
    ):
        list(dataset)


def test_scalar_elements_are_seen_as_scalars():
    strategy = mirrored(2)
    steps = strategy.distribute_dataset(range(5), split="elements", remainder="drop")
    seen = [
        strategy.call_for_each_tower(lambda tower, x: x * 10 + tower.id, x)
        for x in steps.per_tower()
    ]
    assert [x.values.tolist() for x in seen] == [[0, 11], [20, 31]]


# What may be fed.


class Tensor:
    """What a PyTorch tensor offers."""

    def __init__(self, values, grad=True):
        self.values = np.asarray(values)
        self.grad = grad
        self.dtype = "torch.float32"

    def detach(self):
        return Tensor(self.values, grad=False)

    def cpu(self):
        return self

    def numpy(self):
        if self.grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        return self.values


class TensorFlowDataset:
    """What a tf.data.Dataset offers."""

    def __init__(self, values):
        self.values = values

    def as_numpy_iterator(self):
        return iter(self.values)


class HasArray:
    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


SOURCES = {
    "list": [np.arange(4), np.arange(4, 8), np.arange(8, 10)],
    "generator": (np.arange(i, min(i + 4, 10)) for i in range(0, 10, 4)),
    "jax arrays": [jnp.asarray(np.arange(*x)) for x in ((0, 4), (4, 8), (8, 10))],
    "function": lambda: tj.batches(np.arange(10), 4),
    "function of its process": lambda context: tj.batches(
        np.arange(10), context.part_of(4)
    ),
    "torch": [Tensor(np.arange(4)), Tensor(np.arange(4, 8)), Tensor([8, 9])],
    "tf.data": TensorFlowDataset([np.arange(4), np.arange(4, 8), np.arange(8, 10)]),
    "function of tf.data": lambda: TensorFlowDataset([*SOURCES["list"]]),
    "__array__": [HasArray(range(4)), HasArray(range(4, 8)), HasArray(range(8, 10))],
}


def steps_of(source):
    dataset = mirrored(2, 2).distribute_dataset(source)
    return [list(itertools.chain(*examples_of(placed))) for placed in dataset]


STEPS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("name", SOURCES)
def test_sources(name):
    assert steps_of(SOURCES[name]) == STEPS


@pytest.mark.slow
def test_sources_of_grain():
    import grain

    data = np.arange(10)
    rows = grain.MapDataset.source(data).batch(4)
    sampler = grain.samplers.SequentialSampler(
        len(data), shard_options=grain.sharding.NoSharding()
    )
    batches = grain.transforms.Batch(batch_size=4)
    loader = grain.DataLoader(data_source=data, sampler=sampler, operations=[batches])
    for source in (rows, rows.to_iter_dataset(), loader):
        assert steps_of(source) == STEPS


def test_trees_of_a_loader_keep_their_containers():
    Pair = collections.namedtuple("Pair", "x y")
    source = [{"a": [Tensor([1, 2]), Pair(Tensor([3, 4]), Tensor([5, 6]))]}]
    (placed,) = mirrored(2).distribute_dataset(source)
    assert placed.arrays["a"][1].y.tolist() == [5, 6]


def test_tensors_without_distribute_dataset_are_told_of_it():
    with pytest.raises(ValueError, match=r"pass x.numpy\(\), as strategy.distribute_d"):
        tj.batches({"x": Tensor([1, 2])}, 2)


def test_a_function_gives_its_data_anew_each_time():
    calls = []
    dataset = mirrored(2).distribute_dataset(
        lambda: calls.append(1) or iter([np.arange(2)])
    )
    assert [len(list(dataset)), len(list(dataset))] == [1, 1] and len(calls) == 2


@pytest.mark.parametrize("source, text", [
    ({"x": np.zeros(4)}, r"is one batch \(a dict\), .* Pass \[batch\], or tj.b"),
    (np.zeros(4), r"is one batch \(an ndarray\)"),
    (7, "is an int, but must be an iterable of batches, or a fun"),
    (lambda a, b: [],
        r"cannot be called as source\(context\): missing a required arg.*'b'"),
])  # fmt: skip
def test_what_cannot_be_fed_is_refused_at_once(source, text):
    with pytest.raises(ValueError, match=text):
        mirrored(2).distribute_dataset(source)


@pytest.mark.parametrize("source", [range(4), [(1, 2)], [np.float32(3)], [[1.0, 2.0]]])
def test_elements_without_rows_are_told_of_the_other_split(source):
    with pytest.raises(ValueError, match="split='elements' if each tower takes"):
        next(iter(mirrored(2).distribute_dataset(source)))
    with pytest.raises(ValueError, match="data set's function is an int, but must be"):
        list(mirrored(2).distribute_dataset(lambda: len(source)))


def test_a_context_shares_a_batch_evenly():
    context = tj.towers.InputContext(process_index=1, num_processes=2, num_towers=6)
    assert context.part_of(8) == 4
    with pytest.raises(ValueError, match="9 examples cannot be shared evenly by 2"):
        context.part_of(9)


# In advance.


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_prefetch_depth_is_kept(depth):
    pulled = []
    threads = set()

    def source():
        for i in range(20):
            pulled.append(i)
            threads.add(threading.current_thread())
            yield np.full(2, i)

    strategy = mirrored(2, prefetch_on_device=depth)
    iterator = iter(strategy.distribute_dataset(source))
    for i in range(10):
        assert next(iterator).arrays.tolist() == [i, i]
        assert len(pulled) <= i + 1 + depth
    iterator.close()
    assert (threading.current_thread() in threads) == (depth == 0)


def rewritten(size):
    buffer = np.zeros(size, np.float32)
    for i in range(4):
        buffer[...] = i
        yield buffer


def test_a_loader_may_reuse_its_buffer():
    strategy = mirrored(2, 2, prefetch_on_device=2)
    large = strategy.distribute_dataset(
        lambda: rewritten(1 << 20)
    )  # so as to be aligned
    assert [float(placed.arrays.min()) for placed in large] == [0, 1, 2, 3]
    for size in ((), 2):
        dataset = mirrored(4).distribute_dataset(rewritten(size), split="elements")
        ((arrays),) = (placed.arrays for placed in dataset)
        assert arrays.tolist() == np.repeat(np.arange(4.0), size or 1).tolist()


def test_an_error_of_the_loader_comes_after_what_came_before():
    def source():
        yield np.arange(2)
        raise OSError("disk")

    iterator = iter(mirrored(2).distribute_dataset(source))
    assert next(iterator).arrays.tolist() == [0, 1]
    with pytest.raises(OSError, match="disk"):
        next(iterator)
    with pytest.raises(ValueError, match=r"failed with OSError\('disk'\), and cannot"):
        next(iterator)  # and not as if the data had an end here


@pytest.mark.slow
def test_predictions_of_elements_are_in_the_order_of_towers():
    strategy = mirrored(3)
    predict = tj.build_predict_step(lambda params, batch, tower: batch * 2, strategy)
    sizes = [np.arange(3), np.arange(10, 11), np.arange(20, 22)]
    (placed,) = strategy.distribute_dataset(sizes, split="elements")
    assert predict(jnp.float32(0), placed).tolist() == [0, 2, 4, 20, 40, 42]


class Loader:
    """Batches with a cursor, of which nothing says how large the largest is."""

    def __init__(self, batches):
        self.batches = batches
        self.get_state = batches.get_state
        self.set_state = batches.set_state

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


@pytest.mark.parametrize("split", ["batch", "elements"])
@pytest.mark.parametrize("kind", [iter, Loader])
def test_a_pass_says_where_it_is_and_goes_on_there(split, kind):
    def begun():
        source = kind(tj.batches(np.arange(23), 3, epochs=2, seed=1))
        return iter(mirrored(2).distribute_dataset(source, split=split))

    whole = list(begun())
    expected = [examples_of(placed) for placed in whole]
    for number in (0, 3, 7):  # before the smaller last batch, too
        first = begun()
        other = begun()
        for _ in range(number):
            next(first)
        next(other)  # it may have been elsewhere
        cursor = json.loads(json.dumps(first.get_state()))
        other.set_state(cursor)
        assert other.get_state() == cursor
        rest = list(other)
        assert [examples_of(placed) for placed in rest] == expected[number:]
        rows = [placed.rows for placed in rest]
        assert rows == [placed.rows for placed in whole[number:]]
        first.close()
    with pytest.raises(ValueError, match=r"'elements' and 'rows', but got \['posi"):
        begun().set_state({"position": 3})
    made = mirrored(2).distribute_dataset(lambda: tj.batches(np.arange(23), 3))
    assert iter(made).get_state()["elements"]["position"] == 0
    plain = mirrored(2).distribute_dataset([np.arange(2)])
    assert iter(plain).get_state() is None


def test_a_pass_may_begin_at_the_smaller_last_batch():
    source = tj.batches(np.arange(5), 4, epochs=2).at(1)
    dataset = mirrored(2).distribute_dataset(source, remainder="pad")
    counts = [(placed.rows, placed.num_examples) for placed in dataset]
    assert counts == [(2, 1), (2, 4), (2, 1)]


def test_one_process_does_everything_once():
    for strategy in (mirrored(2), tj.tf1.OneDeviceStrategy("cpu:0")):
        assert not strategy.between_graph
        assert strategy.should_init and strategy.should_checkpoint
        assert strategy.should_save_summary


def test_a_batch_placed_for_other_towers_is_refused():
    dev = [f"cpu:{i}" for i in range(2)]
    mine = tj.tf1.MirroredStrategy(devices=dev, towers=2)
    other = tj.tf1.MirroredStrategy(devices=dev, towers=4)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), mine)
    evaluate = tj.build_eval_step(
        lambda w, b, tower: {"n": tj.Weighted.mean(b["y"], tower.weight)}, mine
    )
    (placed,) = other.distribute_dataset([data(8)])
    state = step.init(jnp.zeros(2))
    text = "placed for 4 towers on cpu:0, cpu:1, but the step has 2 towers"
    for call in (
        lambda: step(state, placed),
        lambda: evaluate(state, placed),
        lambda: tj.run(step, state, [placed], progress=False),
        lambda: mine.run_steps_on_dataset(lambda *x: 0.0, iter([placed]), 1, 0.0),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.slow
def test_an_element_goes_to_a_tower_function_as_it_is():
    strategy = mirrored(4, 2)
    dataset = strategy.distribute_dataset([np.arange(8), np.arange(6)])
    data = iter(dataset)
    steps = dataset.per_tower()
    assert next(steps).values.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match=r"\[2, 2, 2, 0\] examples in 2 rows, which"):
        next(steps)

    def tower_fn(tower, tree):
        return tree["x"].sum() + tower.id

    element = next(data)
    out = strategy.call_for_each_tower(tower_fn, {"x": element})
    assert out.values.tolist() == [1, 6, 11, 16]
    unwrapped = np.array(strategy.unwrap(element))
    assert unwrapped.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert strategy.select_tower(element, 2).tolist() == [4, 5]
    assert strategy.reduce(tj.Reduction.SUM, element).tolist() == [12, 16]
    with pytest.raises(ValueError, match=r"\[2, 2, 2, 0\] examples in 2 rows, which"):
        strategy.call_for_each_tower(tower_fn, {"x": next(data)})


def test_a_padded_element_is_handed_on_with_the_number_of_its_rows():
    strategy = mirrored(2)
    (placed,) = strategy.distribute_dataset([np.float32([5, 6, 7])])

    def tower_fn(tower, x, count):
        valid = jnp.arange(len(x)) < count
        return jnp.where(valid, x, 0).sum() / count

    with pytest.raises(ValueError, match=r"both placed.*tj\.PerTower\(placed\.counts"):
        strategy.call_for_each_tower(tower_fn, placed, 2)
    counts = tj.PerTower(placed.counts)
    out = strategy.call_for_each_tower(tower_fn, placed.per_tower(), counts)
    assert out.values.tolist() == [5.5, 7]


def test_elements_with_and_without_rows_do_not_mix_up():
    elements = [np.float32(1), np.arange(3, dtype=np.float32)]
    (placed,) = mirrored(2).distribute_dataset(elements, split="elements")
    assert placed.per_tower().values.shape == (2, 3)
    assert placed.counts.tolist() == [1, 3]


@pytest.mark.slow
def test_an_iterator_alive_at_the_end_of_the_program_is_quiet():
    program = (
        "import numpy as np, towerjax as tj;"
        "s = tj.Mirrored(devices=('cpu:0',));"
        "it = iter(s.distribute_dataset(lambda: (np.ones(4) for _ in range(900))));"
        "next(it); print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
