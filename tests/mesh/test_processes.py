"""Several real processes train what one process trains, to the bit where promised."""

import importlib
import json
import re

import forked
import pytest
from checkout import TESTS

WORKER = TESTS / "workers" / "train.py"
# The runs of one process of eight devices, and of two of two: one start for all.
ALONE = {"plain": {"devices": ["cpu:0"]}, "model": {"placement": "MIRRORED"}}
TOGETHER = {"plain": {"devices": None}, "model": {"placement": "ROUND_ROBIN"}}


def told_in(text, names):
    """What a process printed of each run as a JSON line."""
    lines = re.findall(r"(\{\"process\".*\})$", text, re.M)
    return dict(zip(names, map(json.loads, lines), strict=True))


def worker(runs):
    return forked.program, str(WORKER), str(WORKER.parent), [json.dumps(runs)]


@pytest.fixture(scope="module")
def alone():
    return told_in(forked.told(*worker([*ALONE.values()])), ALONE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("written")


@pytest.fixture(scope="module")
def together(folder):
    given = TOGETHER | {"scenarios": {"scenarios": str(folder)}}
    texts = forked.told_by_all(*worker([*given.values()]))
    told = [told_in(text, given) for text in texts]
    places = [[(one["process"], one["processes"]) for one in x.values()] for x in told]
    assert places == [[(i, 2)] * len(given) for i in range(2)]
    return told


def without_its_place(result):
    places = ("process", "processes", "devices", "should_checkpoint", "between_graph")
    return {name: value for name, value in result.items() if name not in places}


@pytest.mark.slow
def test_two_processes_train_to_the_bits_of_one(alone, together):
    """All towers on one device; two on each of four, each process with its own input.

    Of micro-batches in bfloat16, and several steps a program.
    """
    one = alone["plain"]
    results = [each["plain"] for each in together]
    assert (one["steps"], one["examples"], one["seen"]) == (15, 303, [3.0] * 101)
    assert one["loss"][-1] < 0.5 * one["loss"][0]
    for result in results:
        assert without_its_place(result) == without_its_place(one)
    assert [result["devices"] for result in (one, *results)] == [1, 4, 4]
    assert [result["should_checkpoint"] for result in results] == [True, False]
    assert all(result["between_graph"] for result in results)


@pytest.mark.slow
def test_a_model_trains_to_the_same_bits(alone, together):
    one = alone["model"]
    assert one["losses"][-1] < 0.3 * one["losses"][0] and one["rows"] == 101
    assert one["evaluation"]["accuracy"] > 0.7 and one["copies"] == [8, 8, 8]
    for told in together:
        assert told["model"]["copies"] == [1] * 3
        for name in ("bits", "losses", "evaluation", "rows"):
            assert told["model"][name] == one[name], name


# Two processes of two devices each, what they are told and how their input ends.


@pytest.fixture(scope="module")
def told(together):
    return [one["scenarios"]["told"] for one in together]


@pytest.mark.slow
@pytest.mark.parametrize("scenario, text", [
    ("differing_batches", "global batch must be .* 1 and process 0 differ.*seed"),
    ("differing_towers", "The strategy's towers must be .* {me}: Placement"),
    ("differing_params", r"step.init was given .* {me}: .*params float32\[{more}\]"),
    ("pmap", "executor='pmap' needs devices of one process, but these"),
    ("one_process_has_more_devices", r"\[0, 0, 1\] of 2, .*Name equally many"),
    ("devices_out_of_order", r"\[1, 1, 0, 0\] of 2, .*Name equally many"),
    ("towers_not_for_all", "towers=3 is not a multiple of the 2 .* Use towers=4."),
    ("destination_of_one_process", r"cpu:0 belong to the processes \[0\], but each"),
    ("other_numbers_in_the_optimizer", "step's program must be .* the same optimizer"),
    ("other_options", "The step's options must be .* the same options on all"),
    ("other_numbers_on_towers", r"A function on all .* {me}: .* np.float32\(x\)"),
    ("other_steps_on_data", "A function on all towers must be .* closes over"),
    ("other_numbers_of_steps", "The work of tj.run .* {steps} batches, from st"),
    ("other_numbers_of_batches", "The data to evaluate .* {me}: {more} batches"),
    ("checkpoints_of_one_process", "all processes of a job .* with safetensors"),
    ("folders_of_each", "The process that has locked the .* Here .*own {me}'. Name"),
    ("one_is_empty", r"The input of processes \[0\] ended before .* Give all"),
    ("one_ends_early", r"input of processes \[0\] ended before that of the"),
    ("ends_error", r"gave batches of \[2, 0\] rows .*, or write remainder='pad'"),
])  # fmt: skip
def test_every_process_is_told_what_does_not_fit(told, scenario, text):
    for me, one in enumerate(told):
        assert re.search(text.format(me=me, more=2 + me, steps=3 - me), one[scenario])


TOO_WIDE = (
    "A tower of 4 devices would belong to the processes [0, 1], but must be in one"
)
FAULTS = ("loss/sum", "loss"), ("params", "gradient")
OPS = "Packed", "Hierarchical", "ReduceToOneDevice"
EXPECTED = {
    # Process 0 has batches of 4, 4, 3 rows; process 1 of 4 rows, and an empty one.
    "ends_pad": [[2, 2, 2, 2], [2, 2, 0, 0], [2, 1, 0, 0]],
    "ends_drop": [[2, 2, 2, 2]],
    # 5 elements of 2 rows each and 6 elements of 3 rows, two towers each.
    "elements_of_each": [[2, 2, 3, 3], [2, 2, 3, 3], [2, 0, 3, 3]],
    "data_twice": [3, 3],
    "restored_from_the_chief": [100.0, 100.0, 100.0],
    "left_early": [True, 0],
    "fetched": [3.0, 1.0],
    "ops": dict.fromkeys(OPS, [28.0, 140.0]),
    "saved_and_restored": [6.0, 6.0, 0.75],
    "of_the_first": [3.0, 4.0, 8.0, 1.0, 1, [1.0], [2.0]],
    "sums_of_rows": [[[0, 0], [10, 10], [0, 0]], [[1, 1], [11, 11], [1, 1]]],
    # 2 * (0 + ... + 7 + 0 + 1 + 2) / 11; the rows of a batch that 4 does not divide.
    "evaluated_and_predicted": [62 / 11, [0.0, 2.0, 4.0, 6.0, 8.0]],
    "desynced": [0, "cpu:3", "params"],
    "replayed": [
        True,
        *[["cpu:2", "cpu:3", part] for part in ("gradient", "loss", "update")],
        "A replay runs towers on a neighbouring device of the same process, but each"
        " process has one device of cpu:0, cpu:2"[:90],
    ],
    "not_finite": [[2, 2, *x, "NaN"] for x in FAULTS],
    # In float64: 192.94, with errors one larger in the second step.
    "sharded": [192.94, [1, 2, 2], *[[round(x - 4.61, 2) for x in range(8)]] * 2],
    # By NumPy: 428.786, and w less 1.147 after two steps with momentum.
    "wide": [2, 428.786, [1, 4, 4], [round(x - 1.147, 3) for x in range(8)], TOO_WIDE],
    "shared_values_of_the_first": [-3.5 * (3 + 7 + 8)] * 2,
    "alone_between_meetings": 1.26,  # 3.5 (1 - 0.8^2)
    "learning_rates_of_the_first": 0.25 * 7 + 0.125 * 3.5,
    "audited": [["loss"], False, ["loss"], False, True],
    "steps_on_data": [64.0, 36.0],  # 0 + ... + 7 and 1 + ... + 8
    "towers_values": [60.0, 15.0, [0.0, 10.0, 20.0, 30.0]],
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", EXPECTED)
def test_every_process_sees_the_same_values(told, scenario):
    assert [one[scenario] for one in told] == [EXPECTED[scenario]] * 2


@pytest.mark.slow
def test_parts_on_two_processes_end_on_the_bits_of_one_device(told, monkeypatch):
    monkeypatch.syspath_prepend(WORKER.parent)
    scenarios = importlib.import_module("scenarios")
    bits, size = scenarios.pinned("mirrored", ["cpu:0"])
    assert size == 512
    assert [one["bits_of_parts"] for one in told] == [[bits, 128]] * 2


@pytest.mark.slow
def test_each_process_places_its_own_towers_elements(told):
    assert told[0]["elements_of_all"] == [[[0.0], [1.0]]]
    assert told[1]["elements_of_all"] == [[[2.0], [3.0]]]


@pytest.mark.slow
def test_a_process_may_work_by_itself_on_its_own_devices(told):
    # One step from 0 on 0..7, and from 1 on 1..8: gradients -7 each.
    assert [one["own_devices_alone"] for one in told] == [[False, 0.7], [False, 1.7]]


@pytest.mark.slow
def test_an_input_that_fails_on_one_process_is_told_to_all(told):
    assert told[1]["loader_fails"] == "mine: disk"
    text = "The input of process 1 failed: OSError: disk. See the traceback of that "
    assert told[0]["loader_fails"] == f"{text}process."
    assert "The input of process 0 failed: ValueError: " in told[1]["no_leaves"]
    assert "holds no arrays" in told[0]["no_leaves"]


@pytest.mark.slow
def test_the_first_process_alone_writes(folder, told):
    told = [one["written"] for one in told]
    lines = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
    lines = [(x["kind"], x["step"], x["metrics"]) for x in lines]
    trained = [metrics["loss"] for kind, _, metrics in lines if kind == "train"]
    noted = [[kind, step] for step in (1, 2, 3, 4) for kind in ("train", "eval")]
    assert [[kind, step] for kind, step, _ in lines] == noted
    # It was opened once more, and closed, by the run with a writer that is broken.
    assert told[0]["noted"] == ["closed", *noted, "closed"]
    assert told[1]["noted"] == []
    assert [one["loss"] for one in told] == [trained] * 2


@pytest.mark.slow
def test_every_process_stops_and_keeps_the_same(told):
    for one in [one["written"] for one in told]:
        why = "told did not improve in 2 evaluations in a row, best 2.000 after 2"
        assert (one["stopped"], one["best"]) == (why, 2)
        # Two steps of 6 examples, summed over the towers of both processes.
        assert one["restored"] == [2, 12.0]


@pytest.mark.slow
def test_work_for_one_process_alone_is_refused(told):
    for me, one in enumerate(told):
        works = ["checkpointer=", "WithState.every=[2]", "evaluate=True"]
        for text, work in zip(one["work_of_one_process"], works, strict=True):
            assert "The work of tj.run must be the same on all 2 processes" in text
            assert (work in text) == (me == 1)


@pytest.mark.slow
def test_every_process_hears_of_a_writer_and_of_another_patience(told):
    told = [one["written"] for one in told]
    assert told[0]["refused"] == "read only"
    assert "could not be opened on process 0" in told[1]["refused"]
    for me, one in enumerate(told):
        assert "The work of tj.run must be the same" in one["differs"]
        assert f"patience={1 + me}" in one["differs"]
