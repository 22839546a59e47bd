"""Programs in processes of their own, for any number; faults that are meant."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import towerjax as tj
from towerjax.prover.programs import child, processes, read, same
from towerjax.prover.programs.devices import refuse_others
from towerjax.prover.programs.in_place import Held
from towerjax.prover.programs.processes import NamedFunction, ToldError, name_function
from towerjax.prover.programs.runs import UserProgram

X = np.arange(1, 17, dtype=np.float32)
WEIGHTS = (np.arange(16) > 5).astype(np.float32)  # unequal in each part


def parts(number):
    return zip(np.split(X, number), np.split(WEIGHTS, number), strict=True)


def of_parts(total):
    """``make`` of what is made of the parts of the rows, as many as its number."""

    def make(number):
        return lambda w: w * total(number), [np.float32(2)]

    return make


def right(number):
    sums = [((x * w).sum(), w.sum()) for x, w in parts(number)]
    total, weight = np.sum(sums, axis=0)
    return total / weight


def mean_of_means(number):
    return sum((x * w).sum() / max(w.sum(), 1) for x, w in parts(number)) / number


def sum_of_means(number):
    return sum(x.mean() for x, _ in parts(number))


def divided_twice(number):
    return sum_of_means(number) / number**2


def test_any_number_that_does_not_matter_is_silent():
    report = tj.testing.same_for(of_parts(right), micro_batches=(1, 2, 4))
    assert report.compared == ("result",)
    said = "1 value is the same with micro_batches=2, 4 as with micro_batches=1,"
    assert str(report).startswith(said)


def test_a_mean_of_means_is_told_by_the_name_of_its_number():
    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_for(of_parts(mean_of_means), micro_batches=(1, 4))
    [finding] = error.value.findings
    want = 2 * np.average(X.astype(np.float64), weights=WEIGHTS)
    means = [0, (7 + 8) / 2, (9 + 10 + 11 + 12) / 4, (13 + 14 + 15 + 16) / 4]
    got = 2 * np.mean(means)
    np.testing.assert_allclose((finding.value, finding.one_tower), (got, want), 1e-6)
    head, told, *_ = str(error.value).splitlines()
    assert head == "1 leaf depends on micro_batches:"
    assert "with micro_batches=4 and " in told and "with micro_batches=1:" in told


@pytest.mark.parametrize(
    ("total", "text"),
    [
        (sum_of_means, "result: proportional to workers: "),
        (divided_twice, "result: proportional to 1/workers: "),
    ],
)
def test_a_factor_is_told(total, text):
    for workers in ((1, 2), (2, 8)):
        with pytest.raises(tj.testing.SplitError) as error:
            tj.testing.same_for(of_parts(total), workers=workers)
        assert text in str(error.value)
        assert f"with workers={workers[0]}:" in str(error.value)


def test_the_line_that_divides_by_the_number_is_told():
    def make(number):
        def mean(x):
            total = sum(jnp.split(x, number))[0] * 3.0
            return total / number

        return jax.jit(mean), [X]

    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_for(make, micro_batches=(1, 2))
    lines = error.value.advice[-1]
    code = pathlib.Path(__file__).read_text().splitlines()
    at = 1 + code.index("            return total / number")
    assert lines.startswith("A factor or divisor depends on micro_batches")
    assert f"test_in_processes.py:{at} (mean) (div)." in lines and "(mul)" not in lines


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({}, "needs one number by its name, but got none"),
        ({"a": (1, 2), "b": (1, 2)}, "needs one number by its name, but got 'a' and"),
        ({"a": (2, 2)}, "two or more different numbers"),
        ({"a": (0, 2)}, r"a\[0\]=0"),
    ],
)
def test_what_is_no_number_is_refused(numbers, text):
    with pytest.raises(ValueError, match=text.replace("'a' and", ".*a.*b")):
        tj.testing.same_for(of_parts(right), **numbers)


def test_devices_are_a_number_as_well():
    def make(devices):
        whole = jax.NamedSharding(jax.make_mesh((len(devices),), "i", **AUTO), P())
        return jax.jit(jnp.sum, out_shardings=whole), [X]

    assert tj.testing.same_for(make, devices=(1, 8)).of == "devices"


AUTO = {"axis_types": (jax.sharding.AxisType.Auto,)}


# What is called in processes of their own, here in this one, which has 8 devices.


def everywhere():
    mesh = jax.make_mesh((jax.device_count(),), ("i",), **AUTO)
    specs = {"mesh": mesh, "in_specs": P("i"), "out_specs": P()}
    mean = jax.shard_map(lambda x: jax.lax.pmean(x.mean(), "i"), **specs)
    return jax.jit(mean), [jax.device_put(X, jax.NamedSharding(mesh, P("i")))]


def on_one():
    return jax.jit(jnp.mean), [X]


def finished():
    fn, args = everywhere()
    return {"mean": fn(*args)}


def nothing():
    return None


def here(make):
    return child.run_program(name_function("make()", make), 8)


def test_a_program_runs_as_it_is():
    ran = here(everywhere)
    [call] = ran.seen.calls
    np.testing.assert_allclose(call["result"].numbers, X.mean(dtype=np.float64), 1e-6)
    assert ran.seen.devices == ran.reading.devices == frozenset()
    assert ran.is_program and "test_in_processes.py" in ran.reading.communicates[-1]


def test_what_make_returns_that_is_no_program_is_the_result():
    ran = here(finished)
    [call] = ran.seen.calls
    assert not ran.is_program
    np.testing.assert_allclose(call["result['mean']"].numbers, 8.5, 1e-6)


def test_a_program_must_give_something():
    with pytest.raises(ToldError, match="returned a NoneType, but must return"):
        here(nothing)
    with pytest.raises(ToldError, match=r"make\(\) ran with 8 devices instead of 2"):
        child.run_program(name_function("make()", everywhere), 2)


def test_nearby_runs_begin_with_the_same():
    first, *nearby = child.run_nearby(name_function("make()", finished), 8, 1e-4)
    assert nearby == [] and not first.has_arguments


def test_who_takes_nothing_is_called_in_a_process():
    assert same.takes_nothing(nothing) and same.takes_nothing(lambda *, a=1: None)
    assert not same.takes_nothing(lambda devices=None: None)
    assert not same.takes_nothing(lambda *a: None) and not same.takes_nothing(dict)
    for unnamed in (lambda: None, nothing.__call__):
        with pytest.raises(ValueError, match="takes no argument, .*at the top level"):
            name_function("make()", unnamed)


def test_a_function_is_found_by_its_name_or_its_file(tmp_path):
    named = name_function("make()", everywhere)
    assert named == NamedFunction(__name__, "everywhere", os.path.abspath(__file__))
    assert processes.find_function(named, 8) is everywhere
    (tmp_path / "odd name.py").write_text("class A:\n  def make(): return __name__\n")
    path = list(sys.argv)
    try:
        for module, name in ("__main__", "__mp_main__"), ("of_nobody",) * 2:
            at = NamedFunction(module, "A.make", str(tmp_path / "odd name.py"))
            assert processes.find_function(at, 8)() == name
            assert sys.argv == [at.file] and sys.modules.pop(name)
    finally:
        sys.argv[:] = path


def test_jax_is_told_of_the_devices_before_it_wakes(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=8")
    found = processes._environment(3)
    assert found["XLA_FLAGS"] == "--a=1" and found["JAX_NUM_CPU_DEVICES"] == "3"
    assert found["JAX_PLATFORMS"] == "cpu"


STARTS = """
import towerjax as tj, time
from towerjax.prover.programs.processes import call_in_process
call_in_process("x", 1, time.sleep, 600)
"""


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_waits_for_it():
    variables = {**os.environ, "JAX_PLATFORMS": "cpu"}
    parent = subprocess.Popen([sys.executable, "-c", STARTS], env=variables)
    until = time.monotonic() + 60
    while not (children := children_of(parent.pid)):
        assert time.monotonic() < until and parent.poll() is None
        time.sleep(0.1)
    time.sleep(5)  # until it listens
    parent.kill()
    parent.wait()
    while any(map(is_running, children)):
        assert time.monotonic() < until
        time.sleep(0.1)


def is_running(pid):
    path = pathlib.Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().split(") ")[1][0] != "Z"


def children_of(pid):
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    return path.read_text().split() if path.exists() else []


def test_the_end_of_a_process_is_told():
    def told(label, code, last):
        how = processes._how_it_ended(code)
        return processes._told_of_death(label, how, last)

    assert told("2 devices", 3, ["a", "b", ""]) == (
        "The process of 2 devices ended with exit code 3. The last line that it"
        " printed: b"
    )
    killed = told("x", -signal.SIGKILL, [])
    assert "was killed by SIGKILL. It printed nothing." in killed
    assert "ended before it gave a result" in told("x", 0, [])
    note = "For simplicity, JAX has removed its internal frames from the traceback of"
    assert told("x", 1, ["ValueError: a", "-" * 20, note]).endswith("ValueError: a")


PROGRAM = textwrap.dedent("""
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, PartitionSpec as P

    if jax.config.jax_num_cpu_devices < 8:  # in a process of its own
        jax.config.update("jax_num_cpu_devices", 3)

    X = np.arange(1, 9, dtype=np.float32)

    def trained(reduce):
        number = jax.device_count()
        print("on", number)
        update = lambda w, x: w - 0.1 * reduce((w * x).mean(), "i")
        update, w = jax.pmap(update, "i"), jnp.ones(number)
        for _ in range(2):
            w = update(w, X.reshape(number, -1))
        return float(w[0])

    def main():
        return trained(jax.lax.pmean)

    def summed():
        return trained(jax.lax.psum)

    def parses():
        import argparse
        argparse.ArgumentParser().parse_args()
        return main()

    def dies():
        print("hello")
        raise RuntimeError("no more")

    def on_one():
        return jax.jit(jnp.sum), [X]

    def share(devices):
        mesh = Mesh(devices, "i")
        specs = {"mesh": mesh, "in_specs": P("i"), "out_specs": P()}
        mean = lambda x: jax.lax.pmean(x.sum(), "i")
        return jax.jit(jax.shard_map(mean, **specs)), [X]
""")


@pytest.mark.slow
def test_a_trainers_own_main_is_checked_as_it_is(shell):
    call = "--devices", "1", "2"
    code, out, err = shell("check", "of_user:parses", *call)
    assert code == 0 and "is the same on 2 devices as on one" in out
    assert err == "[1 device] on 1\n[2 devices] on 2\n"
    code, out, err = shell("check", "of_user:summed", *call, "--json")
    told = json.loads(out)
    assert code == 1 and [x["leaf"] for x in told["findings"]] == ["result"]
    want = [(1 - 0.1 * 4.5) ** 2, (1 - 0.2 * 4.5) ** 2]
    assert f"{want[1]:.6g} on 2 devices" in told["findings"][0]["text"]
    assert f"and {want[0]:.6g} on one" in told["findings"][0]["text"]
    assert "rtol" in told["findings"][0]["advice"]
    code, out, err = shell("check", "of_user:dies", *call)
    *_, last, told = err.splitlines()
    assert code == 1 and not out and err.count("hello") == 1
    assert last == "[1 device] RuntimeError: no more"
    assert told.endswith("exit code 1. The last line that it printed: " + last[11:])
    code, out, err = shell("check", "of_user:on_one", *call)
    assert code == 2 and "make() runs on 1 device, cpu:0" in err


@pytest.mark.slow
def test_a_fault_that_is_meant_is_told_and_passes(shell):
    call = "check", "of_user:share", "--devices", "1", "2", "--run"
    code, _, err = shell(*call, "--baseline", "meant.json")
    assert code == 2 and "--write-baseline meant.json" in err
    code, out, _ = shell(*call, "--github")
    assert code == 1 and out.count("::error file=of_user.py,line=") == 2
    code, out, _ = shell(*call, "--write-baseline", "meant.json")
    assert code == 0 and out.count("meant: ") == 2
    code, out, _ = shell(*call, "--baseline", "meant.json", "--github")
    assert code == 0 and out.count("meant: ") == 2 and "::error" not in out
    told = json.loads(pathlib.Path("meant.json").read_text())
    told["of_user:share"][1]["relative"] = 0.01
    told["of_user:share"][0]["leaf"] = "another"
    pathlib.Path("meant.json").write_text(json.dumps(told))
    code, out, _ = shell(*call, "--baseline", "meant.json", "--json")
    told = json.loads(out)
    assert code == 1 and not told["same"] and not told["meant"]
    assert [x["kind"] for x in told["findings"]] == ["equality", "comparison"]
    pathlib.Path("meant.json").write_text("[]")
    assert "Write it again" in shell(*call, "--baseline", "meant.json")[2]
    assert shell(*call, "--json", "--github")[0] == 2


NAMES = "all_devices", "as_it_is"
AS_IT_IS = textwrap.dedent("""
    import fractions  # a library
    import jax, numpy as np
    from jax.sharding import Mesh, PartitionSpec as P
    from all_devices import DEVICES

    X = np.arange(1, 9, dtype=np.float32)
    WHOLE = jax.NamedSharding(Mesh(DEVICES, "i"), P())

    def share(devices):
        mesh = Mesh(devices, "i")
        specs = {"mesh": mesh, "in_specs": P("i"), "out_specs": P()}
        mean = lambda x: jax.lax.pmean(x.sum(), "i")
        return jax.jit(jax.shard_map(mean, **specs)), [X]

    def share_of_all():
        return share(DEVICES)

    def own():
        specs = {"mesh": WHOLE.mesh, "in_specs": P("i"), "out_specs": P()}
        fn = jax.shard_map(lambda x: x.sum(), **specs, check_vma=False)
        return jax.jit(fn), [X]

    def untraced():
        return lambda x: float(x[0]) * x, [jax.device_put(X, WHOLE)]

    def of_a_library():
        if not hasattr(fractions, "seen"):
            fractions.seen = jax.device_count()
        return share(DEVICES)[0], [X / fractions.seen]
""")


@pytest.mark.slow
def test_the_proof_says_the_same_of_a_program_that_is_run_as_it_is(shell, request):
    request.addfinalizer(lambda: [sys.modules.pop(x, 0) for x in NAMES])
    pathlib.Path("all_devices.py").write_text("import jax; DEVICES = jax.devices()")
    pathlib.Path("as_it_is.py").write_text(AS_IT_IS)

    def told_of(name):
        code, out, _ = shell("check", name, "--devices", "1", "2", "--json")
        assert code == (not name.endswith("untraced"))
        return json.loads(out)

    given = told_of("as_it_is:share")
    as_it_is = told_of("as_it_is:share_of_all")
    fault = given["findings"][0]
    assert fault["text"].startswith("result: 1/D times what it is on one device: a sum")
    assert fault["kind"] == "equality" and fault == as_it_is["findings"][0]
    assert as_it_is["results"] == given["results"]
    fault = told_of("as_it_is:own")["findings"][0]
    assert fault["kind"] == "proof" and "as_it_is.py" in fault["text"]
    notes = told_of("as_it_is:untraced")["notes"]
    [note] = [x for x in notes if "nothing is proved" in x]
    assert "cannot be traced (ConcretizationTypeError" in note
    notes = told_of("as_it_is:of_a_library")["notes"]
    [note] = [x for x in notes if "nothing is proved" in x]
    assert "its program on 2 is another than in a process of its own" in note


AS_A_USER = textwrap.dedent("""
    import sys
    import jax, jax.numpy as jnp, numpy as np, optax
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    X = np.arange(1, 9, dtype=np.float32)

    def mesh():
        return jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))

    def of_set_mesh():
        jax.set_mesh(mesh())
        fn = lambda x: jax.lax.pmean(x.sum(), "i")
        return jax.jit(jax.shard_map(fn, in_specs=P("i"), out_specs=P())), [X]

    def of_nnx():
        jax.set_mesh(None)
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        state = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        rows = jax.device_put(X[:, None], NamedSharding(mesh(), P("i")))

        @nnx.jit
        def step(model, state, x):
            @jax.shard_map(mesh=mesh(), in_specs=(P(), P("i")), out_specs=P())
            def slope(kernel, x):
                return jax.lax.psum((2 * kernel * x * x).mean(), "i")[None, None]

            grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
            grads.kernel.set_value(slope(model.kernel[...], x))
            state.update(model, grads)

        return step, (model, state, rows)

    def main():
        assert len(sys.argv) == 1, sys.argv
        parts = X.reshape(jax.device_count(), -1)
        total = jax.pmap(lambda x: jax.lax.psum(x.sum(), "i"), "i")(parts)
        print("total", *total)
        return float(total[0])
""")


@pytest.mark.slow
def test_set_mesh_and_nnx_and_arguments_of_a_main(shell):
    pathlib.Path("as_a_user.py").write_text(AS_A_USER)
    call = "--devices", "1", "2"
    code, out, err = shell("check", "as_a_user:of_set_mesh", *call)
    assert code == 1
    assert "result: 1/D times what it is on one device" in out + err
    code, out, _ = shell("check", "as_a_user:of_nnx", *call)
    assert code == 1 and "args[1].opt_state[0].nu['kernel'].value is " in out
    code, out, err = shell("check", "as_a_user:main", *call)
    want = "[1 device] total 36.0\n[2 devices] total 36.0 36.0\n"
    assert (code, err) == (0, want)


def test_a_users_modules_are_imported_anew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_somebody").mkdir()
    (tmp_path / "of_somebody" / "part.py").write_text("")
    monkeypatch.delitem(sys.modules, "sched", raising=False)
    with processes.forgets_modules():
        import sched

        from of_somebody import part
    assert not {"of_somebody", "of_somebody.part"} & {*sys.modules}
    assert sys.modules["sched"] is sched and part


def test_a_digest_tells_programs_apart():
    class Other:
        pass

    def digest(fn, *args):
        return read.digest_of(UserProgram("make()", (fn, args)))

    def plus(number):
        array = jnp.full(2, number)
        return lambda x: (x + array, Other())

    ones = np.ones(2, np.float32)
    assert digest(plus(1.0), ones) == digest(plus(1.0), ones)
    others = [
        digest(plus(2.0), ones),  # of which the text is the same
        digest(plus(1.0), 2 * ones),
        digest(lambda x: x + 1.0, ones),
        digest(lambda x: x + 1.1, ones),
        digest(lambda x: {"a": x + 1.1}, ones),
    ]
    assert len({*others, digest(plus(1.0), ones)}) == 6
    assert digest(lambda x: float(x[0]), ones) == ""


def test_a_digest_is_of_the_arguments_as_they_were_given():
    def changes(x):
        x += 1
        return x

    ran, fresh = [
        UserProgram("make()", (changes, [np.ones(2, np.float32)])) for _ in range(2)
    ]
    ran.run()
    assert read.digest_of(ran) == read.digest_of(fresh) != ""


# What programs hold and where they run.


def test_keys_of_a_dict_that_is_held_need_no_order():
    held = {0: X.copy(), "one": WEIGHTS.copy(), None: jnp.ones(2)}
    before = Held(lambda: held, [])
    held["one"] += 1
    assert [*before.changed()] == ["fn.held['one']"]


def test_what_is_not_yet_defined_holds_nothing():
    def make(devices):
        if not devices:
            later = None
        return lambda x: x.sum() or later, (X,)

    fn, args = make(jax.devices()[:1])
    assert not Held(fn, args).changed()


class Host:
    platform = "of_the_host"


def test_what_is_kept_on_another_platform_runs_nowhere_else():
    own = jax.devices()[:2]
    other = Host()
    refuse_others(own, frozenset([*own, other]))
    with pytest.raises(ValueError, match=r"make\(2 devices\) runs on 1 device, cpu:0,"):
        refuse_others(own, frozenset([own[0], other]))
