"""In a notebook: which leaf is mirrored, sizes, all escaped."""

import jax
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.types import tables
from towerjax.types.boundary import api_boundaries
from towerjax.types.tables import Table, as_text, by_rich, leaf_table, number_of
from towerjax.types.version import page

UNITS = {
    tables.in_seconds: (1000, {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}),
    tables.in_bytes: (1024, {x: 1024.0**i for i, x in enumerate(
        "B KiB MiB GiB TiB PiB".split())}),
    tables.in_flops: (1000, {x: 1000.0**i for i, x in enumerate(
        "FLOP kFLOP MFLOP GFLOP TFLOP PFLOP EFLOP".split())}),
}  # fmt: skip


def test_no_time_is_shown_in_seconds():
    assert tables.in_seconds(0.0) == "0 s"


@pytest.mark.parametrize("in_words", UNITS, ids=lambda x: x.__name__)
def test_a_number_is_shown_by_three_digits_of_the_unit_that_fits(in_words):
    base, units = UNITS[in_words]
    sizes = [*units.values(), base * max(units.values())]
    edges = [x * size for size in sizes[:-1] for x in (1, 0.998, 1.004, 999)]
    draws = np.exp(np.random.default_rng(0).uniform(*np.log(sizes[:: len(units)]), 99))
    for value in [0.0, *[x for x in edges if x >= sizes[0]], *draws]:
        number, unit = in_words(value).split(" ")
        # What rounds up to the next unit is shown by either.
        most = [value, 1.001 * value]
        fits = [[x for x in units if units[x] <= y or not value][-1:] for y in most]
        assert [unit] in fits or value < min(units.values()), (value, unit)
        assert abs(float(number) * units[unit] - value) <= 5.01e-3 * value
        assert float(number) <= base or unit == [*units][-1]
        assert len(number.replace(".", "").lstrip("0")) <= 3 + (float(number) > 999)


def loss_fn(params, batch, tower):
    loss = tj.Weighted.mean((batch @ params["w"]) ** 2, tower.weight)
    return tj.TowerOutput(loss, local=tower.local + 1)


def made(strategy):
    step = tj.build_train_step(loss_fn, optax.adam(0.1), strategy)
    local = tj.TowerLocal(np.zeros(6, np.float32), tj.Reduction.SUM)
    return step, step.init({"w": np.ones((512, 1), np.float32)}, local=local)


def shown(value):
    """What a notebook shows of a value as text; its HTML has the same."""
    bundle = value._repr_mimebundle_(include=None, exclude=None)
    assert "<script" not in bundle["text/html"]
    return bundle["text/plain"]


@pytest.mark.slow
def test_a_state_says_how_each_leaf_lies():
    strategy = tj.Mirrored(devices=("cpu:0", "cpu:1", "cpu:2"), towers=6)
    step, state = made(strategy)
    rows = {row.split("│")[1].strip(): row for row in shown(state).splitlines()[4:-2]}
    for name in ("params['w']", "opt_state[0].mu['w']"):
        cells = [cell.strip() for cell in rows[name].split("│")[2:-1]]
        assert cells == ["[512, 1]", "float32", "2 KiB", "2 KiB", "mirrored"]
    cells = [cell.strip() for cell in rows["local.value"].split("│")[2:-1]]
    assert cells == ["[6, 6]", "float32", "144 B", "48 B", "per tower"]
    # Three weights, adam's count, the step, the key, and what each tower has.
    assert "7 leaves, 6.16 KiB; 6.06 KiB on each device" in shown(state)
    step(state, np.ones((6, 512), np.float32))
    assert shown(state).count("donated") == 5 and "mirrored" in shown(state)


def test_leaves_of_every_kind_have_a_layout():
    one = jax.device_put(np.zeros(3, np.float32), jax.devices()[5])
    strategy = tj.Mirrored(devices=("cpu:2", "cpu:3"))
    per_tower = strategy.placement.sharding(tj.towers.Layout.PER_TOWER)
    split = jax.device_put(np.zeros((2, 4), np.float32), per_tower)
    leaves = {
        "one device": one,
        "host": np.zeros(2),
        "shape only": jax.ShapeDtypeStruct((4, 2), np.float32),
        "sharded": split,
    }
    table = leaf_table("x", [(name, leaf, None) for name, leaf in leaves.items()])
    assert [row[0] for row in table.rows] == [row[5] for row in table.rows]
    assert [row[3:5] for row in table.rows[2:]] == [("32 B", "0 B"), ("32 B", "16 B")]
    assert leaf_table("x", [("a", one, "per tower")]).rows[0][5] == "per tower"
    for count in (40, 41):
        many = leaf_table("x", [(f"{i}", 3, None) for i in range(count)])
        assert len(many.rows) == 40 and many.note.startswith(f"{count} leaves")
        assert many.note.endswith("the first 40 are shown") == (count > 40)
    lone = leaf_table("x", [("a", one, None), ("b", one, None)], 1)
    assert lone.note.endswith("on each device; the first is shown")
    assert leaf_table("x", [("a", one, None)]).note.startswith("1 leaf, 12 B")


def test_a_state_is_printed_as_a_table():
    state = tj.TrainState.create({"w": np.ones((512, 2), np.float32)}, optax.sgd(0.1))
    title, head, *rows, note = state.table().splitlines()
    assert title == "TrainState"
    assert head.split() == "leaf shape dtype bytes on each device layout".split()
    cells = [row.split("  ") for row in rows]
    cells = {row[1]: [x.strip() for x in row[2:] if x] for row in cells}
    lies = ["[512, 2]", "float32", "4 KiB", "4 KiB", "one device"]
    assert cells["params['w']"] == lies
    assert note == "  3 leaves, 4.01 KiB; 4.01 KiB on each device"
    assert "the first is shown" in state.table(rows=1)
    with pytest.raises(ValueError, match="rows=0 must be a whole number >= 1"):
        state.table(rows=0)


def test_one_thing_is_no_several():
    assert number_of(1, "device") == "1 device" and number_of(0, "step") == "0 steps"
    assert number_of(2048, "leaf", "leaves") == "2,048 leaves"
    summary = tj.loop.RunSummary(1, 1, 1, 1, 0.5, 2.0, 2.0)
    first = "1 step, 1 example on 1 tower, 1 device: 2 steps/s, 2 examples/s, "
    assert str(summary) == first + "0.5 s of compiling"


def test_no_caption_wraps_at_the_width_of_its_table():
    note = "a note of twelve words, which is longer than its table is wide"
    shown = by_rich([Table(note.upper(), ("a",), (("1",),), note)])["text/plain"]
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0] == note.upper() and lines[-1] == note


def test_rows_do_not_break_in_a_narrow_page():
    page = by_rich([Table("t", ("a",), (("1",),))])["text/html"]
    assert "white-space:pre;overflow-x:auto" in page


def test_a_table_is_shown_as_its_lines_by_a_notebook():
    lines = as_text([Table("t", ("a",), (("1",),))])
    assert repr(lines) == str(lines) == "t\n  a\n  1"


def test_a_table_takes_no_text_for_markup():
    table = Table("[bold]t", ("[red]a", "n"), (("<b>[/]", "1"), ("x", "22")), "[u]")
    bundle = by_rich([table])
    for text in ("[bold]t", "[red]a", "<b>[/]", "[u]"):
        assert text in bundle["text/plain"] and text in as_text([table])
    assert "<b>" not in bundle["text/html"]
    assert "font-family:monospace" in bundle["text/html"]
    assert as_text([table]).splitlines()[2:4] == ["  <b>[/]   1", "  x       22"]


def test_a_class_is_a_boundary_where_a_user_may_enter():
    @api_boundaries
    class Entered:
        def __init__(self): ...
        def __call__(self): ...
        def opened(self): ...
        def _inside(self): ...

    found = [name for name, x in vars(Entered).items() if hasattr(x, "__wrapped__")]
    assert found == ["__init__", "__call__", "opened"]


def test_a_page_and_its_sections_have_an_address():
    docs = "https://github.com/towerjax/towerjax/blob/main/docs"
    assert page("how_to/sweeps") == f"{docs}/how_to/sweeps.md"
    assert page("same_bits", "Of two steps") == f"{docs}/same_bits.md#of-two-steps"
