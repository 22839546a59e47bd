"""In a notebook: where each part lies, which leaf is mirrored, sizes, all escaped."""

import html.parser
import re

import jax
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.types.tables import Table, as_html, curve, first_rows, leaf_table


class Rows(html.parser.HTMLParser):
    """The cells' texts, row by row, and the titles of squares; HTML must nest."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open, self.titles = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "span":
            self.titles.append(dict(attrs)["title"])
        assert tag not in ("script", "link", "img")
        self.open += [tag] * (tag != "polyline")

    def handle_startendtag(self, tag, attrs):
        assert tag == "polyline"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def loss_fn(params, batch, tower):
    loss = tj.Weighted.mean((batch @ params["w"]) ** 2, tower.weight)
    return tj.TowerOutput(loss, local=tower.local + 1)


def made(strategy):
    step = tj.build_train_step(loss_fn, optax.adam(0.1), strategy)
    local = tj.TowerLocal(np.zeros(6, np.float32), tj.Reduction.SUM)
    return step, step.init({"w": np.ones((512, 1), np.float32)}, local=local)


@pytest.mark.slow
def test_a_state_says_where_each_leaf_lies():
    strategy = tj.Mirrored(devices=("cpu:0", "cpu:1", "cpu:2"), towers=6)
    step, state = made(strategy)
    text = state._repr_html_()
    shown = Rows(text)
    rows = {row[0]: row[1:] for row in shown.rows}
    weights = ["[512, 1]", "float32", "2 KiB", "2 KiB", "mirrored", ""]
    assert rows["params['w']"] == weights == rows["opt_state[0].mu['w']"]
    per_tower = ["[6, 6]", "float32", "144 B", "48 B", "per tower", ""]
    assert rows["local.value"] == per_tower
    assert rows["rng"][1:3] == ["key<fry>", "8 B"]
    # Three weights, adam's count, the step, the key, and what each tower has.
    assert shown.rows[-1][:5] == ["7 leaves", "", "", "6.16 KiB", "6.06 KiB"]
    parts = [title for title in shown.titles if "[" in title]
    assert parts == ["cpu:0: [0:2, :]", "cpu:1: [2:4, :]", "cpu:2: [4:6, :]"]
    squares = re.findall(r'title="(cpu:\d): (.*?)".*?hsl\((\d+),', text)
    assert len({hue for _, part, hue in squares if part != "all"}) == 3
    assert len({hue for _, part, hue in squares if part == "all"}) == 1

    step(state, np.ones((6, 512), np.float32))
    rows = {row[0]: row for row in Rows(state._repr_html_()).rows}
    assert rows["params['w']"][4:] == ["0 B", "donated", ""]
    assert rows["local.value"][5] == "donated" and rows["step"][5] == "mirrored"


def test_values_of_every_kind_have_a_form():
    one = jax.device_put(np.zeros(3, np.float32), jax.devices()[5])
    rows = Rows(tj.PerTower((one, np.zeros(2), 3))._repr_html_()).rows
    assert [row[5] for row in rows[1:4]] == ["per tower", "host", "host"]
    assert [row[2] for row in rows[1:4]] == ["float32", "float64", "int"]
    shape = jax.ShapeDtypeStruct((4, 2), np.float32)
    rows = Rows(leaf_table("x", [("a", one, None), ("b", shape, None)])).rows
    assert [row[5] for row in rows[1:3]] == ["one device", "shape only"]
    assert rows[2][3:5] == ["32 B", "0 B"]
    strategy = tj.Mirrored(devices=("cpu:2", "cpu:3"))
    split = jax.device_put(
        np.zeros((2, 4), np.float32),
        strategy.placement.sharding(tj.towers.Layout.PER_TOWER),
    )
    assert Rows(leaf_table("x", [("a", split, None)])).rows[1][5] == "sharded"


def test_a_strategy_says_which_device_has_which_towers():
    strategy = tj.Mirrored(devices=("gpu:0", "gpu:1"), towers=6, local="scan")
    rows = Rows(strategy._repr_html_()).rows  # which this machine need not have
    assert rows[1:3] == [["gpu:0", "0", "1", "2"], ["gpu:1", "3", "4", "5"]]
    last = ["6 towers on 2 devices", "3 on each, one after another", "AllReduce()"]
    assert rows[3] == last
    assert Rows(tj.OneDevice("cpu:1")._repr_html_()).rows[1] == ["cpu:1", "0"]
    many = tj.Mirrored(devices=[f"tpu:{i}" for i in range(1000)])
    text = many._repr_html_()
    assert "… 960 more" in text and len(text) < 8_000
    ill = tj.Mirrored(cross_tower_ops=tj.collectives.Hierarchical(group_size=3))
    assert "group_size=3" in Rows(ill._repr_html_()).rows[0][0]


@pytest.mark.slow
def test_a_history_shows_its_steps_and_curves():
    step, state = made(tj.Mirrored(devices=("cpu:0", "cpu:1")))
    batches = [np.ones((4, 512), np.float32)] * 30
    _, history = tj.run(step, state, batches, progress=False)
    text = history._repr_html_()
    rows = Rows(text).rows
    assert rows[0] == ["step", "loss"] and len(rows) == 1 + 20 + 1
    assert rows[1][0] == "1" and rows[-2][0] == "30"
    assert float(rows[1][1]) == pytest.approx(history.metrics["loss"][0], rel=1e-3)
    points = re.findall(r"(\d+),(\d+)", re.search('points="(.*?)"', text)[1])
    assert len(points) == 30 and points[0][0] == "0" and points[-1][0] == "200"
    first, last = (int(points[i][1]) for i in (0, -1))
    assert first < last  # the loss falls; y counts downwards


def test_curves_leave_out_what_is_not_finite():
    assert curve("x", np.array([np.nan, 1.0, np.inf])) == ""
    text = curve("a<b", np.array([1.0, np.nan, 3.0, 3.0]))
    assert 'points="0,38 133,2 200,2"' in text and "a&lt;b" in text
    assert 'points="0,38 200,38"' in curve("x", np.array([2, 2]))


def test_everything_is_escaped_and_long_tables_are_cut():
    bad = "<script>alert(1)</script>"
    state = tj.PerTower({bad: np.zeros((2, 1))})
    table = as_html([Table(bad, (bad,), ((bad,),), bad)])
    assert bad not in state._repr_html_() and bad not in table
    few = first_rows([(str(i),) for i in range(100)])
    rows = Rows(as_html([Table("x", ("n",), few, last=("sum",))])).rows
    assert len(rows) == 1 + 40 + 1 + 1 and rows[-2:] == [["… 60 more"], ["sum"]]
    assert repr(tj.PerTower(1)) == "PerTower(values=1)"
