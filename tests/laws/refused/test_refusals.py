"""What cannot be done across towers says so, and says what to write."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from layouts import with_verbs as mirrored
from refusals import refused

import towerjax as tj

R = tj.Reduction
ops = tj.collectives
ONE = np.ones(2, np.float32)
TWO = tj.PerTower(np.float32([1, 2]))
OWN = dict(reduction=R.SUM, tower_local=True)


def made(initial=1.0, T=2, **options):
    return mirrored(T).create_var("v", initial, **options)


def named(value, name="v"):
    return tj.towers.MirroredVar(value, name=name)


def in_towers(fn, *args, T=2, **options):
    return lambda: mirrored(T, **options).call_for_each_tower(fn, *args)


def in_merge(fn, T=2):
    """Of the strategy and all towers' ids."""
    return in_towers(lambda tower: tower.merge_call(fn, tower.id), T=T)


def assigned(initial, value, **options):
    """A tower assigns to a variable."""
    return lambda: in_towers(
        lambda tower, v: tower.assign(v, value), made(initial, **options)
    )()


def across(initial, value, **options):
    return lambda: mirrored(2).assign(made(initial, **options), value)


def read(fn, initial=1.0):
    """A function of the strategy and a tower's own copy, in a tower."""
    return lambda: in_towers(
        lambda tower, n: fn(mirrored(2), n), made(initial, **OWN)
    )()


def updated(*args, of=None, fn=lambda x, y: x, **options):
    return lambda: mirrored(2).update(of or made(), fn, *args, **options)


def again(method):
    """Towers that have met, which meet as the one around them."""
    first = {"reduce": [R.MEAN], "all_gather": []}.get(method, [lambda _, v: v])
    return in_towers(
        lambda tower: tower.merge_call(
            lambda strategy, v: getattr(tower, method)(*first, {"v": v}), 1.0 + tower.id
        )
    )


def restored(like, given):
    return lambda: tj.towers.restored_values(mirrored(2), like(), given)


def keys():
    return jax.random.split(jax.random.key(0), 4)


def trees(like, given):
    """Of arrays, and of variables."""
    for make in (np.float32, lambda x: made(np.float32(x))):
        yield restored(lambda make=make: jax.tree.map(make, like), given)


# fmt: off
REDUCTIONS = "SUM, MEAN or ONLY_FIRST_TOWER"
MIRRORED = "Expected value to be mirrored across towers"
IS_OWN = "variable 'v' is, in a tower function, that tower's copy"
COPIES = r"variable 'v' has shape \(2,\), but dim 0 .* the 3 towers.*restored_values"
ADDED = (r"^strategy.assign_{0} of tower-local variable 'v' is unclear. To change "
    r"each tower's copy write strategy.update\(v, lambda x: x {1} value\). To change "
    r"the one value that strategy.read_var\(v\) makes of the copies write "
    r"strategy.assign\(v, strategy.read_var\(v\) {1} v")
NO_NUMBER = "got a random key, which is not a number. Use Reduction.ONLY_FIRST"
ONLY_SOME = "Only some towers reach"
IN_TURN = (r"{} needs all towers at once, but tower_loop='scan' runs the towers.*Use "
    r"tower_loop='vmap', or return the value as.*compute it in an earlier pass of "
    r"tj.build_step.*call_for_each_tower are reduced by strategy.reduce")
UNEQUAL = r"shapes \(1,\), \(2,\), \(1,\), which .*concatenate\(strategy.unwrap"
SHARED = (r"^reduce got SUM of {}, which is the same on all 3 towers. Use "
    r"Reduction.MEAN for the value itself, or multiply by num_towers\.$")
MADE = (r"variable 'v', the result\['new'\],\['x'\] depends on tower.id and is "
    r"not.*\nWrite tower.assign\(v, x\), or tower.assign_add, which")
MEETINGS = {
    "tower.merge_call": lambda t: t.merge_call(lambda s, v: s.reduce(R.SUM, v), t.id),
    "tower.reduce": lambda t: t.reduce(R.SUM, t.id),
    "tower.all_gather": lambda t: t.all_gather(t.id).sum(),
    "tower.axis_names": lambda t: lax.psum(t.id, t.axis_names),
}
WHOLE = "={} must be a whole number >= "
CONSTANT = (r"A constant value 5.0 cannot be reduced with the given aggregation "
    r"Reduction\.SUM of variable 'v': it is the same on all 2 towers. Create the "
    r"variable with MEAN or ONLY_FIRST_TOWER, and assign the value itself\.")
# fmt: on
SHAPE = (6, 2)
PAIRS = np.ones((2, 2), np.float32)
NO_ROW = "IndexedRows.indices has {}"
NO_ROW += ", but the array has 6 rows, from 0 to 5."
TABLE = PAIRS[[0] * 6]
FACTORED = optax.adafactor(0.1, min_dim_size_to_factor=2)
KEPT = "grads['a'] has a gradient of rows, but the optimizer keeps {} for it, w"


def rows(values=PAIRS, indices=(0, 1), shape=SHAPE, array=np.array):
    return tj.sparse.IndexedRows(values, array(indices), shape)


def of_rows(optimizer, like=None, array=TABLE, indices=(0, 1), **options):
    """An update of an array by rows, with the state of an optimizer like it."""
    given = {"a": rows(indices=indices, array=jnp.array)}

    def update():
        state = (like or optimizer).init({"a": jnp.asarray(TABLE)})
        params = {"a": jnp.asarray(array)}
        return tj.sparse.update_with_rows(optimizer, given, state, params, **options)

    return update


# fmt: off
VERBS = {
    # Variables, made and assigned in towers and across them.
    "create_var": [
        (lambda: made(tower_local="on_read"), "Invalid variable synchronization mode"),
        (lambda: made(reduction="mean"), "MirroredVar.reduction is 'mean'; write tj.R"),
        (lambda: made(TWO), f"create_var of 'v': {MIRRORED}"),
        (lambda: made("w"), "create_var: 'v' is a str: keep values that"),
    ],
    "tower.assign": [
        (assigned(1.0, 2.0), r"'v' has Reduction.NONE: .*Create it with reduction=tj"),
        (assigned(1.0, 5.0, reduction=R.SUM), CONSTANT),
        (assigned(ONE, ONE, reduction=R.SUM), r"constant value of shape \(2,"),
        (assigned(1.0, ONE, reduction=R.MEAN), r"fit variable 'v': value has shape \("),
        (assigned(1.0, {"a": 1.0}, reduction=R.MEAN), "for variable 'v' is PyTreeD"),
        (assigned(1, 2.5, reduction=R.ONLY_FIRST_TOWER), "float32, which int32 cannot"),
        (assigned(1, 2, reduction=R.MEAN), "value is float32, which int32 cannot hold"),
        (assigned(np.int8(1), np.int8(0), reduction=R.SUM), "int32, which int8 cannot"),
        (assigned(1, 0.5, tower_local=True), "tower-local variable 'v': value is f"),
        (assigned({"a": 1.0, "b": [1, 2]}, {"a": np.ones(3), "b": [1, 2.5]},
                reduction=R.ONLY_FIRST_TOWER),
            r"\['a'\] has shape \(3,\), expected \(\); value\['b'\]\[1\] is float32"),
        *[(lambda x=x, v=v, T=T, r=r: in_towers(lambda tower, v, x: tower.assign(v, x),
                made(v, T, reduction=r), jnp.asarray(x), T=T)(),
            f"variable 'v': value is {of}, which {v.dtype} cannot hold")
            for T in (1, 2) for v, r, of in [
                (np.uint8(0), R.SUM, "uint32"), (np.bool_(0), R.SUM, "int32"),
                (np.int32(0), R.MEAN, "float32"), (np.bool_(0), R.MEAN, "float32")]
            for x in (v, np.zeros((), of))],
        (in_towers(lambda tower: tower.assign(1.0, 2.0)),
            "tower.assign: got .*, expected a tj.towers.MirroredVar or a tj.TowerLo"),
    ],
    "strategy.assign": [
        (across(1.0, TWO), f"strategy.assign of variable 'v': {MIRRORED}"),
        (across(1.0, [1.0]), "The value for variable 'v' is PyTreeDef"),
        (across([1.0, 2.0], ONE), r"tree of its elements: np.array\(x\) makes one"),
        (across(1.0, "x"), "value is a str: keep values that are not arrays"),
        (across(ONE, np.ones(3), tower_local=True), r"shape \(3,\), expected \(2,"),
        (across(np.int8(0), 300), "variable 'v'.* value is 300, which int8"),
        (lambda: mirrored(4).assign(made(np.int8(0), 4, **OWN), 1000),
            "'v': a tower's share is 250, which int8"),
        (lambda: mirrored(3).assign(made(**OWN), 1.0), COPIES),
        (lambda: mirrored(2).assign(made(), tj.sparse.IndexedRows(ONE[:, None],
            np.array([0, 0]), (3, 1))),
            r"variable 'v' is .*IndexedRows.*rows\.add_to\(variable\.value\)"),
        *[(lambda x=x: getattr(mirrored(2), x)(1.0, 2.0),
            f"strategy.{x}: got float, expected a tj.towers.MirroredVar")
            for x in ("assign", "assign_add", "assign_sub")],
        *[(lambda x=x: getattr(mirrored(2), f"assign_{x}")(made(**OWN), 2.0),
            ADDED.format(x, sign)) for x, sign in (("add", r"\+"), ("sub", "-"))],
    ],
    "no difference": [
        (lambda: mirrored(2).assign_sub(made(np.bool_(1)), True),
            "sub does not accept dtype bool", TypeError),
        (lambda: mirrored(2).assign_add(made(jax.random.key(0)), jax.random.key(1)),
            "add does not accept dtype key<fry>", TypeError),
        (lambda: in_towers(lambda tower, v: tower.assign_sub(v, True),
            made(np.bool_(1), tower_local=True))(), "sub does not accept dtype bool",
            TypeError),
    ],
    "strategy.update": [
        (lambda: mirrored(2).update(1.0, abs), "update: got float, expected a tj.t"),
        (lambda: mirrored(3).update(made(**OWN), abs), COPIES),
        (updated({"k": [TWO]}), f"of variable 'v': {MIRRORED}, got a PerTower. Redu"),
        (lambda: updated(made(**OWN))(), f"{MIRRORED}, got a TowerLocal. Reduce it"),
        (updated(y=TWO), f"strategy.update of variable 'v': {MIRRORED}"),
        (updated(fn=lambda x: None), r"value for variable 'v' is PyTreeDef\(.*None.*"
            r"A function for strategy\.update returns"),
        (updated(fn=lambda x: jnp.ones(2)), r"value has shape \(2,\), expected \(\)"),
    ],
    "a mirrored variable": [
        (in_towers(lambda tower, v: {"new": named({"x": v.value["x"] + tower.id})},
            named({"x": np.float32(1)})), MADE),
    ],
    # A tower's own copy, and what is across towers, in a tower.
    "an own copy": [(call, IS_OWN) for call in (
        read(lambda strategy, n: tj.towers.saved_values({"n": n})),
        read(lambda strategy, n: tj.towers.restored_values(strategy, n, ONE[0])),
        read(lambda strategy, n: strategy.fetch(n)),
        read(lambda strategy, n: strategy.read_var(n)),
        read(lambda strategy, n: strategy.unwrap(n)),
        read(lambda strategy, n: strategy.select_tower(n, 1)),
        read(lambda strategy, n: strategy.reduce(R.SUM, n)),
        # A copy of as many elements as there are towers is not all copies.
        read(lambda strategy, n: strategy.read_var(n), ONE),
        read(lambda strategy, n: strategy.assign(n, 1.0), ONE),
        read(lambda strategy, n: strategy.call_for_each_tower(
            lambda tower, v: v.value.sum(), n)),
    )],
    "in a tower": [
        *[(in_towers(lambda t, r=r, x=x, T=T: mirrored(T).reduce(r, x(t.id)), T=T),
            rf"strategy.reduce needs all .* in a tower.*tower.reduce\(tj.{r!r}, x")
            for r in (R.SUM, R.MEAN, R.ONLY_FIRST_TOWER) for T in (1, 2)
            for x in (lambda id: 1.0 + id, lambda id: {"x": id})],
        (in_towers(lambda t: mirrored(2).broadcast({"x": t.id})),
            r"strategy.broadcast needs all .*tower.reduce\(tj.Reduction.ONLY_F"),
        (in_towers(lambda t: mirrored(2).fetch({"x": t.id})),
            r"strategy.fetch needs all .*Write x itself"),
        (in_towers(lambda t, x: mirrored(2).select_tower(x, 1), TWO),
            r"strategy.select_tower needs all .*tower.all_gather\(x\)\[1\]"),
        *[(in_towers(lambda tower, x=x: getattr(tower, x) + 0, T=2),
            f"tower.{x} exists only in a step: call_for_each_tower has no batch")
            for x in ("weight", "rng", "step", "rows")],
        (lambda: mirrored(2).call_for_each_tower(lambda t: 1.0, run_concurrently="no"),
            "run_concurrently='no' must be True or False"),
    ],
    # Towers that meet.
    "merge_call": [
        *[(again(x), f"tower.{x} got a PerTower, which .* write strategy.reduce")
            for x in ("reduce", "all_gather", "merge_call")],
        (in_merge(lambda strategy, v: strategy.reduce(R.SUM, v, destinations="cpu:0")),
            "destinations='cpu:0' cannot be used inside a tower .*Leave destinat"),
        *[(in_merge(lambda strategy, v, x=x: tj.PerTower(x(strategy.unwrap(v)[0])), 3),
            text) for x, text in [
            (lambda x: jnp.stack([x, x]), r"merge_fn returned has shape \(2,\)"),
            (lambda x: (x, x), r"shape \(2,\), but dim 0 runs over the 3 towers"),
            (lambda x: (x, x[None], x), r"of shapes \(\), \(1,\), \(\), which c")]],
        (in_merge(lambda strategy, x: tj.PerTower(strategy.unwrap(x))),
            r"shape \(\), .* or pass a tuple of them"),
        *[(in_towers(lambda t, x=x: lax.cond(
                t.id == 0, lambda: x(t), lambda: 0 * t.id)), ONLY_SOME)
            for x in MEETINGS.values()],
        *[(in_towers(x, T=4, devices=2, tower_loop="scan"), IN_TURN.format(name))
            for name, x in MEETINGS.items()],
    ],
    "tower.reduce": [
        *[(in_towers(lambda t, r=r: t.reduce(r, t.id)), REDUCTIONS)
            for r in (R.NONE, "sum", None)],
        *[(in_towers(lambda t, r=r: t.reduce(r, jax.random.key(0)), T=T), NO_NUMBER)
            for r in (R.SUM, R.MEAN) for T in (1, 2)],
    ],
    "tower.all_gather": [
        (in_towers(lambda t: t.all_gather({"x": 1.0 * t.id}, axis=1)),
            r"axis=1 is not a dim of value\['x'\] of shape \(\)\. .*give x\[None\]"),
        *[(in_towers(lambda t, axis=axis: t.all_gather(ONE, axis=axis)),
            "axis=.* must be an int, one dim") for axis in (0.0, (0, 1), "0", True)],
    ],
    "axes": [
        (in_towers(lambda t: lax.psum(t.id, t.axis_names,
            axis_index_groups=[[0], [1, 2, 3]]), T=4),
            r"psum with axis_index_groups=.* tower.all_g"),
        (lambda: tj.OneDevice(axis_name="towerjax_device"), "_device' must be a name"),
        *[(lambda x=x: mirrored(4, **x), text) for x, text in [
            (dict(axis_name=""), "axis_name='' must be a name that nothing"),
            (dict(axis_name=None), "axis_name=None must be a name that"),
            (dict(axis_name="towerjax_local"), "'towerjax_local' must be a name th"),
            (dict(axis_name="batch", tower_loop="scan"), "tower_loop='scan' they")]],
        *[(in_towers(lambda t, x=x: t.reduce(R.SUM, t.id) + lax.psum(t.id, x), T=4,
            devices=D), f"axis.*{x}", (ValueError, NameError))
            for x in ("towerjax_device", "towerjax_local") for D in (1, 2, 4)],
        *[(in_towers(fn, T=4, devices=D, tower_loop="scan", cross_tower_ops=op),
            "names the axis 'towerjax_device', .*Write tower.id. With tower_loop")
            for D in (1, 2, 4) for op in (tj.AllReduce(), tj.PinnedTree())
            for fn in (lambda t: t.id + lax.axis_index("towerjax_device"),
                lambda t: lax.all_gather(t.id, "towerjax_device"))],
    ],
    # All towers' values from outside.
    "reduce": [
        *[(lambda x=x: mirrored(3).reduce(R.SUM, {"x": x}), SHARED.format(text))
            for x, text in [(5.0, "5.0"), (np.int32(3), "3"),
                (np.arange(2), r"an array of shape \(2,\)")]],
        (lambda: mirrored(2).reduce(R.NONE, 1.0), "NONE says that a value must not"),
        (lambda: mirrored(2).reduce("sum", 1.0), f"'sum', which .*n.{REDUCTIONS}"),
        (lambda: mirrored(2).reduce(None, 1.0), "reduction is None, which"),
        *[(lambda r=r, x=x: mirrored(4, 2).reduce(r, x()), NO_NUMBER)
            for r in (R.SUM, R.MEAN)
            for x in (lambda: tj.PerTower(keys()),
                lambda: {"a": tj.PerTower((*keys(),))})],
        *[(lambda x=x: mirrored(3).reduce(R.SUM, tj.PerTower(x)), text)
            for x, text in [
                (np.ones((2, 2)), r"shape \(2, 2\), but dim 0 runs"),
                ((ONE,) * 4, "holds values of 4 towers, but"),
                ((np.ones(1), ONE, np.ones(1)), UNEQUAL)]],
        *[(lambda x=x: mirrored(2).batch_reduce(R.SUM, [(TWO, None), x]),
            r"pairs\[1\] is .* a pair \(value, destinations")
            for x in (TWO, "no", (1.0,), (1.0, None, 2.0))],
    ],
    "broadcast": [
        (lambda: mirrored(2).broadcast([TWO]), f"strategy.broadcast: {MIRRORED[:40]}"),
        *[(lambda x=x: mirrored(2).broadcast(1.0, x), re.escape(text))
            for x, text in [
                (3, "destinations=3 must be a device name"),
                ({"cpu:0"}, "destinations={'cpu:0'} must be a device name"),
                (("cpu:0", 1), "devices: 1 is not a device name"),
                (TWO, "or a value that lies on devices. Leave it out"),
                ("somewhere", "'somewhere' is not a device name"),
                (tj.PerTower(()), "a device name, such as 'gpu:0', a jax.Device")]],
    ],
    "map": [
        (lambda: mirrored(2).map(lambda x, y: x, [1], {"y": TWO}), f"map: {MIRRORED}"),
        (lambda: mirrored(2).map(lambda x: x, []), "map got no elements"),
        (lambda: mirrored(2).map([1, 2], abs), r"\[1, 2\] is not a function; .*\(fn"),
        (lambda: mirrored(2).map(lambda x: {"rows": tj.sparse.IndexedRows(
                np.ones((1, 2)), np.array([1]), (5, 2))}, [1, 2]),
            "map: fn returned IndexedRows.*rows.to_dense"),
    ],
    "read": [
        (lambda: mirrored(2).read_var({"n": tj.TowerLocal(ONE, R.NONE, "n")}),
            r"as one value: tree\['n'\]: tower-local variable 'n' has Reduc.*Give them"
            " SUM.*unwrap"),
        (lambda: mirrored(2).fetch(TWO), f"strategy.fetch: {MIRRORED}"),
        (lambda: mirrored(2).fetch(made(), "cpu:99"), "'cpu:99' is not on this machin"),
        (lambda: mirrored(2).unwrap(tj.PerTower([1.0, 2.0])),
            "or pass a tuple of them; a list is"),
        *[(lambda x=x: mirrored(3).select_tower(tj.PerTower((7, 8, 9)), x),
            "select_tower: tower=.* must be a whole number") for x in (1.5, 3, -1)],
        (lambda: mirrored(3, 3).select_tower(tj.PerTower((7, 8, 9)), "gpu:2"),
            "gpu:2 has no tower of those on cpu:0, cpu:1, cpu:2. Name"),
        (lambda: mirrored(3).select_tower(tj.PerTower((7, 8, 9)), "cpu:0"),
            "cpu:0 has 3 towers of those on cpu:0. Name the tower by its number"),
    ],
    "regroup": [(lambda x=x: mirrored(2).regroup(x), text) for x, text in [
        ([[0], []], r"nests holds PyTreeDef\(\[\*\]\) of tower 0 and .* of tower 1"),
        ([{"k": (1,)}, {"k": [1]}], r"\{'k': \(\*,\)\}.* and .*\{'k': \[\*\]\}"),
        ([1], "regroup got a list of 1, but needs a list of 2 trees"),
        ([named(1.0, "foo"), named(1.0, "bar")],
            "but has several names, .*'foo'.*'bar'"),
        ([{"v": named(1.0)}, {"v": named(2.0)}],
            r"nests\['v'\]: a mirrored variable must .*reductions or value"),
        ([tj.TowerLocal(1.0, R.SUM), tj.TowerLocal(1.0, R.MEAN)],
            "nests holds .*SUM.* of tower 0 and .*MEAN.* of tower 1"),
    ]],
    # Saved and restored.
    "saved": [
        (lambda: tj.towers.saved_values({"a": [tj.TowerLocal(ONE, R.NONE, "noise")],
                "k": tj.TowerLocal(keys(), R.MEAN), "fine": 1}),
            r"as one value: tree\['a'\]\[0\]: tower-local variable 'noise' has Reducti"
            r"on.NONE; tree\['k'\]: a t"),
        (lambda: tj.towers.saved_values(tj.TowerLocal(ONE, R.NONE, "noise")),
            "read as one value: tower-local variable 'noise' has Reduction.NONE"),
        (restored(lambda: made(np.int8(0), **OWN), np.int32(255)),
            "tower-local variable 'v': a tower's share is 128, which int8 cannot"),
        *[(call, f"saved has another structure .* It {text}")
            for like, given, text in [
            ({"a": 1, "b": 1}, {"a": 2}, r"lacks saved\['b'\]; it has besides nothing"),
            ([1, 1], [2, {"c": 3}, 4], r"lacks nothing; it has besides saved\[2\]"),
            ((1, {"v": 1}), (2, 3), r"lacks saved\[1\]\['v'\]; it has besides sav"),
            ([1, 1], (2, 3), "lacks nothing; it has besides nothing. .*same contai"),
        ] for call in trees(like, given)],
    ],
    # Cross-tower ops.
    "ops": [
        *[(lambda x=x: ops.Packed(**x), re.escape(text)) for x, text in [
            (dict(num_packs=0), "num_packs must be greater than zero, got 0"),
            (dict(num_packs=True), f"num_packs{WHOLE.format(True)}1"),
            (dict(bytes_per_pack=0), f"bytes_per_pack{WHOLE.format(0)}1"),
            (dict(bytes_per_pack=1.5), f"bytes_per_pack{WHOLE.format(1.5)}1"),
            (dict(max_group=0), f"max_group{WHOLE.format(0)}1"),
            (dict(num_packs=2, bytes_per_pack=8),
                "bytes_per_pack=8): num_packs already sets the size of")]],
        *[(call, re.escape(text)) for x, text in [
            (ops.ReduceToOneDevice("cpu:7"), "device='cpu:7' is not one of"
                " the strategy's devices, cpu:0, cpu:1, cpu:2, cpu:3."),
            (ops.Hierarchical(3), "group_size=3 does not divide the number of"
                " devices, 4, into equal groups. Use 1 or 2 or 4, or Hierarchical("),
            (ops.Hierarchical(8), "group_size=8 does not divide")]
            for call in (lambda x=x: mirrored(8, 4, cross_tower_ops=x),
                lambda x=x: x.sum_over_towers([ONE], mirrored(8, 4).placement.axes))],
        (lambda: tj.tf1.MirroredStrategy(cross_tower_ops=ops.Hierarchical(3)).placement,
            "does not divide the number of devices"),
        *[(lambda x=x: tj.AllReduce(x), "pack_below_bytes=.* must be a whole"
            " number >= 0") for x in ("x", None, True, 1.5, -1)],
        *[(lambda x=x: ops.choose_cross_tower_ops(*x), re.escape(text))
            for *x, text in [
                ([], "must be a tuple of names"),
                (["gpu:0", "cuda:0"], "names gpu:0 more than once"),
                (["gpu:0", "cpu:0"], "of several platforms, cpu and gpu")]],
        (lambda: tj.AllReduce(group_size=2, device="cpu:0"), "both group_size and"),
    ],
    # Trees of the towers, and rows of a table.
    "rows": [
        *[(in_towers(lambda tower, x=x: tower.all_gather(rows(), axis=x)), re.escape(
            f"axis={x} cannot join IndexedRows of an array of shape (6, 2)"))
            for x in (1, -1)],
        *[(call, re.escape(NO_ROW.format(bad))) for bad in (-1, 6, 100) for call in (
            lambda bad=bad: rows(indices=(1, bad)),
            lambda bad=bad: rows(indices=(1, bad), array=jnp.array).to_dense(),
            lambda bad=bad: rows(indices=(1, bad), array=jnp.array).add_to(TABLE))],
        *[(call, re.escape(text)) for *x, text in [
            (PAIRS, (0.0, 1.0), SHAPE, "are float64, not integers. Give"),
            (np.ones((2, 3)), (0, 0), SHAPE, "got values of shape (2, 3) and indices of"
                " shape (2,). Give values [r, 2]"),
            (np.ones((3, 2)), (0, 0), SHAPE, "values of shape (3, 2)"),
            (ONE, 0, SHAPE, "indices of shape (). Give values [r, 2]"),
            (1.0, 0, (), "IndexedRows.dense_shape is (), but must be (N, ...)")]
            for call in (lambda x=x: rows(*x),)],
        (lambda: jax.eval_shape(lambda v, i: tj.sparse.IndexedRows(v, i, SHAPE),
            np.ones((3, 2)), np.array([0, 0])), r"values of shape \(3, 2\)"),
        *[(lambda r=r, x=x: mirrored(2).reduce(r, x), re.escape(text))
            for r, x, text in [
                (R.SUM, rows(), "SUM of IndexedRows, which is the same on all 2"),
                ("sum", tj.PerTower((rows(), rows())), "'sum', which is not a re"),
                (R.SUM, tj.PerTower((rows(), rows(shape=(7, 2)))), "Tower 1 has rows of"
                    " an array of shape (7, 2) but tower 0 of (6, 2)"),
                (R.SUM, tj.PerTower((rows(), {"x": rows()})),
                    "holds PyTreeDef(*) of tower 0 and PyTreeDef({'x': *}) of tower 1"),
                (R.SUM, tj.PerTower((rows(),) * 3), "holds values of 3 towers, but the "
                    "strategy has 2 towers. Give one value"),
                (R.SUM, tj.PerTower(rows(np.ones((3, 2)), (0, 1, 2))),
                    "has shape (3, 2), but dim 0 runs over the 2 towers"),
                (R.SUM, tj.PerTower(rows()), "indices [T, r], but these have shape"),
                (R.SUM, tj.PerTower((rows(), np.ones(()))),
                    "Tower 1 has an ndarray where other towers")]],
        (lambda: rows().add_to(np.ones((6, 3))), r"added to an array of shape \(6, 3"),
        (lambda: np.zeros((3, 2), np.float32) + rows(), r"to an array of shape \(3,"),
        (lambda: np.zeros(SHAPE, int) + rows(), "of float32 cannot be added to an arr"),
        (lambda: TABLE + rows(PAIRS * 1j), "of complex64 cannot be added to an array"),
        (of_rows(optax.adagrad(0.1), array=np.ones((8, 2))), re.escape("parameters that"
            " train: grads['a'] is [6, 2], expected [8, 2].")),
        *[(of_rows(optax.adagrad(0.1), x, lazy=True), re.escape(
            "opt_state is not the result of optimizer.init(params): "))
            for x in (optax.adam(0.1), optax.sgd(0.1))],
        (of_rows(optax.adagrad(0.1), indices=(0, 6)), NO_ROW.format(6)),
        *[(of_rows(x, lazy=True), re.escape(KEPT.format(leaf))) for x, leaf in [
            (FACTORED, "opt_state[0].v_col['a']"), (optax.sm3(0.1),
                "opt_state[0].mu['a'][0]"),
            (optax.scale_by_lbfgs(), "opt_state.diff_params_memory['a']")]],
    ],
    "trees": [
        *[(call, text) for bad, text in [
            ({"a": ONE}, "of tower 1, which cannot be stacked. Give all"),
            ({"a": np.ones(3), "n": 1}, r"shapes \(2,\), \(3,\)"),
            ({"a": "word", "n": 1}, r"\[1\](\['a'\])? is a str: keep values")]
            for value in [tj.PerTower(({"a": ONE, "n": 1}, bad))]
            for call in (in_towers(lambda tower, x: 1, value),
                lambda value=value: mirrored(2).reduce(R.SUM, value))],
        (in_towers(lambda tower, x: 1, tj.PerTower(("a", "b"))),
            r"argument's values\[0\] .and 1 more of that list. is a str: keep"),
        (lambda: tj.sparse.IndexedRows(ONE > 0, np.array([0, 1]), (2,)),
            "IndexedRows.values are bool"),
        *[(call, text) for values, dtype, text in [
            ("f4", "i4", "of float32 .* array of int32"),
            ("c8", "f4", "of complex64 .* array of float"),
            ("f4", jnp.bfloat16, "float32 .* of bfloat16"),
            ("i4", "i1", "of int32 .* an array of int8")]
            for rows in [tj.sparse.IndexedRows(np.ones(1, values), np.array([1]), (2,))]
            for array in [np.zeros(2, dtype)]
            for call in (lambda r=rows, x=array: r.add_to(jnp.asarray(x)),
                lambda r=rows, x=array: jax.jit(lambda r, x: r.add_to(x))(r, x))],
    ],
}
# fmt: on


ROWS = [
    pytest.param(*row[:2], *(row[2:] or [ValueError]), id=f"{verb} {number}")
    for verb, rows in VERBS.items()
    for number, row in enumerate(rows)
]


@pytest.mark.few_fast(30)
@pytest.mark.parametrize(("call", "text", "error"), ROWS)
def test_what_cannot_be_done_across_towers_is_refused(call, text, error, compiled):
    refused(compiled, call, text, error)


@pytest.mark.parametrize("reduction", [R.MEAN, R.ONLY_FIRST_TOWER])
def test_what_all_share_comes_back_as_an_array_of_its_own(reduction):
    mine = np.ones(3, np.float32)
    out = mirrored(4, 2).reduce(reduction, {"a": mine, "n": 3})
    mine[:] = 7
    assert isinstance(out["a"], jax.Array) and out["a"].tolist() == [1.0] * 3
    assert out["n"] == 3
    alone = tj.Mirrored(towers=1).reduce(R.SUM, mine)  # no question
    assert isinstance(alone, jax.Array) and alone.tolist() == [7.0] * 3


@pytest.mark.slow
def test_a_tower_local_variable_that_a_tower_closes_over_is_told():
    strategy = mirrored(4, 2)
    v = strategy.create_var("v", 1.0, reduction=R.SUM, tower_local=True)
    text = r"shape \(\), expected \(4,\).*own copy.* passed .* closes over"
    with pytest.raises(ValueError, match=text):
        strategy.call_for_each_tower(lambda tower: tower.assign_add(v, 1.0))
    own = strategy.call_for_each_tower(lambda tower, v: tower.assign_add(v, 1.0), v)
    assert own.value.tolist() == [2.0] * 4


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_variable_that_a_tower_closes_over_is_told(num_devices):
    """It is read once: by a function that is called again it would be an old one."""
    strategy = mirrored(2, num_devices)
    v = strategy.create_var("v", np.float32([1, 2]))
    own = tj.PerTower(np.float32([2, 3]))
    reads = [lambda tower, x: v.value, lambda tower, x: jax.jit(lambda: v.value + 0)()]
    for tower_fn in reads:
        assert strategy.call_for_each_tower(tower_fn, own).tolist() == v.value.tolist()
        v = strategy.assign_add(v, np.float32([1, 1]))
        text = r"variable's value, .*: float32\[2\]\. .*arguments, of fn\(tower, var"
        with pytest.raises(ValueError, match=text):
            strategy.call_for_each_tower(tower_fn, own)

    def tower_fn(tower, x, v):
        return v.value * x

    for _ in range(2):
        out = strategy.call_for_each_tower(tower_fn, own, v)
        expected = np.outer([2, 3], v.value)
        assert out.values.tolist() == expected.tolist()
        v = strategy.assign_add(v, np.float32([1, 1]))  # the next call sees it
    # What a jit around it is given is no constant.
    tower_fn = lambda w: lambda tower: w * tower.id  # noqa: E731
    own = jax.jit(lambda w: strategy.call_for_each_tower(tower_fn(w)))
    assert own(v.value).values.tolist() == [[0, 0], v.value.tolist()]


@pytest.mark.slow
def test_a_variable_that_the_steps_of_a_loop_close_over_is_told():
    strategy = mirrored(2, 2)
    v = strategy.create_var("v", 1.0)

    def run(step, carry):
        data = iter(strategy.distribute_dataset(range(4), split="elements"))
        return strategy.run_steps_on_dataset(step, data, 2, carry).final

    def step(ctx, carry, x):
        return carry + v.value

    assert float(run(step, 0.0)) == 2.0
    text = r"variable's value, .*: float32\[\]\. .*in the carry of run_steps_on"
    with pytest.raises(ValueError, match=text):
        run(step, 0.0)
    total, _ = run(
        lambda ctx, carry, x: (carry[0] + carry[1].value, carry[1]), (0.0, v)
    )
    assert float(total) == 2.0


def test_a_name_of_tensorflow_that_is_missing_says_what_to_write():
    strategy = mirrored(4, 2)
    v = strategy.create_var("v", 1.0)
    each = tj.PerTower(np.ones(2, np.float32))
    local = strategy.create_var("l", 1.0, reduction=R.MEAN, tower_local=True)
    cases = [
        (lambda: strategy.scope(), "docs/reference/mirrored_strategy.md"),
        (lambda: v.assign(2.0), r"v = strategy\.assign\(v, x\)"),
        (lambda: local.get(), r"tj\.towers\.read_local\(v\) for all towers"),
        (lambda: each.get("cpu:0"), r"strategy\.unwrap\(x\)\[t\]"),
        (
            lambda: strategy.update(v, lambda x, g: x.assign_sub(g), 1.0),
            r"must return the new value: lambda x, g: x - 0\.1 \* g",
        ),
    ]
    for call, text in cases:
        with pytest.raises(AttributeError, match="has no attribute") as caught:
            call()
        assert re.search(text, caught.value.__notes__[0]), text
    assert not hasattr(v, "shape") and copy.deepcopy(strategy) == strategy
    assert pickle.loads(pickle.dumps(v)) == v


def test_a_merge_function_reduces_what_it_is_given():
    strategy = mirrored(4, 2)

    def merge_fn(strategy, x, v):
        total = strategy.reduce(R.SUM, x)
        return strategy.reduce(R.MEAN, total), strategy.read_var(v)

    v = strategy.create_var("v", 1.0, reduction=R.SUM, tower_local=True)
    out = strategy.call_for_each_tower(
        lambda tower, v: tower.merge_call(merge_fn, 1.0 + tower.id, v), v
    )
    assert [float(x) for x in out] == [10, 4]


def test_a_reduction_that_is_added_to_the_others_is_nowhere_a_sum():
    greatest = object.__new__(R)
    greatest._name_ = greatest._value_ = "MAX"
    strategy = mirrored(4, 2)
    x = np.float32([1, 5, 2, 3])
    mirrored_var = tj.towers.MirroredVar(np.float32(1), greatest, name="v")
    own = tj.TowerLocal(x, greatest, name="n")

    def metric_fn(params, batch, tower):
        return {"own": tower.local["n"]}

    evaluate = tj.build_eval_step(metric_fn, strategy)
    state = tj.build_train_step(metric_fn, optax.sgd(0.1), strategy).init(
        0.0, local={"n": tj.TowerLocal(np.float32(1), greatest)}
    )
    calls = [
        lambda: strategy.call_for_each_tower(
            lambda tower, x: tower.reduce(greatest, x), tj.PerTower(x)
        ),
        lambda: strategy.call_for_each_tower(
            lambda tower, v: tower.assign(v, tower.id), mirrored_var
        ),
        lambda: strategy.reduce(greatest, tj.PerTower(x)),
        lambda: strategy.reduce(greatest, 5.0),
        lambda: strategy.assign(own, 5.0),
        lambda: strategy.read_var(own),
        lambda: evaluate(state, x),
    ]
    for call in calls:
        with pytest.raises(AssertionError, match="MAX"):
            call()


def of_two_towers():
    """A step, and its first state."""

    def loss_fn(params, batch, tower):
        return tj.Weighted.mean(params["w"] * batch, tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(2, 2), audit=False)
    return step, step.init({"w": np.float32(1)})


def of_copies_that_differ():
    _, state = of_two_towers()
    w = state.params["w"]
    devices = [shard.device for shard in w.addressable_shards]
    copies = [jax.device_put(np.float32(i), x) for i, x in enumerate(devices)]
    wrong = jax.make_array_from_single_device_arrays(w.shape, w.sharding, copies)
    with pytest.raises(tj.DesyncError) as caught:
        tj.check_mirrored(state.replace(params={"w": wrong}))
    [differing] = caught.value.differing
    return tj.DesyncError(131, [differing])


def of_a_tower_with_nan():
    step, state = of_two_towers()
    locations = step.locate(state, np.float32([1, np.nan]))
    assert {x.tower for x in locations} == {1}
    return tj.NonFiniteError(3, locations)


ERRORS = {
    "CheckpointError": lambda: tj.CheckpointError("no manifest"),
    "ReplicationError": lambda: tj.ReplicationError("loss depends on the tower"),
    "DesyncError": of_copies_that_differ,
    "NonFiniteError": of_a_tower_with_nan,
    "SplitError": lambda: tj.testing.SplitError(
        [tj.testing.Finding("loss", 2, "in order", 1.5, 1.0, 0.5, 0.5)]
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_copied_and_pickled_whole(name):
    error = ERRORS[name]()
    assert type(error).__name__ == name
    error.add_note("on host 3")
    pickled = [
        pickle.loads(pickle.dumps(error, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)
    ]
    for other in [*pickled, copy.copy(error), copy.deepcopy(error)]:
        assert type(other) is type(error) and str(other) == str(error)
        assert vars(other) == vars(error) and other.args == error.args
