"""Which cluster a process belongs to: every source, and every way to get it wrong."""

import dataclasses
import json
import re
import socket

import pytest

import towerjax as tj
from towerjax.mesh.cluster import start
from towerjax.mesh.cluster.spec import (
    detection,
    find_cluster,
    forgotten,
    free_port,
    is_free,
    is_loopback,
    own_devices,
    refusal,
    started_cluster,
)
from towerjax.mesh.cluster.start import _join_cluster, _other_processes

Cluster = tj.cluster.Cluster
parse_spec = tj.cluster.parse_spec

WORKERS = {"worker": ["a:1", "b:2"]}


@pytest.mark.parametrize("jobs, task, expected", [
    (WORKERS, ("worker", 0), (0, 2, "a:1")),
    (WORKERS, ("worker", 1), (1, 2, "a:1")),
    ({**WORKERS, "chief": ["c:3"]}, ("chief", 0), (0, 3, "c:3")),
    ({**WORKERS, "chief": ["c:3"]}, ("worker", 1), (2, 3, "c:3")),
    ({**WORKERS, "chief": []}, ("worker", 0), (0, 2, "a:1")),
    ({"worker": ("[::1]:2222",)}, ("worker", 0), (0, 1, "[::1]:2222")),
    ({"chief": ["one:1"]}, ("chief", 0), (0, 1, "one:1")),
])  # fmt: skip
def test_the_chief_is_first_and_the_workers_follow(jobs, task, expected):
    found = parse_spec(jobs, *task)
    assert (found.process_id, found.num_processes, found.coordinator) == expected
    job, index = task
    whole = {"cluster": jobs, "task": {"type": job, "index": index}}
    assert parse_spec(whole) == found
    text = json.dumps({**whole, "environment": "cloud"})
    of_text = find_cluster({"TF_CONFIG": text})
    assert (of_text.process_id, of_text.num_processes) == expected[:2]


def test_worker_10_comes_after_worker_2_as_listed():
    workers = [f"host-{i}:2222" for i in reversed(range(12))]
    found = [parse_spec({"worker": workers}, "worker", i) for i in range(12)]
    assert [cluster.process_id for cluster in found] == list(range(12))
    assert {cluster.coordinator for cluster in found} == {"host-11:2222"}


def whole(cluster, task):
    return {"cluster": cluster, "task": task}


WORKER_0 = ("worker", 0)
FULL = whole(WORKERS, {"type": "worker", "index": 0})


@pytest.mark.parametrize("spec, task, says", [
    (["a:1"], (), "cluster_spec is ['a:1'], which names no list of processes. Write"),
    (whole(["a:1"], None), (), 'no list of processes. Write, for example, {"cluster":'),
    ({"task": {"type": "worker", "index": 0}}, (), "no list of processes."),
    ({"worker": []}, WORKER_0, "leave all of it out for a job of one process."),
    ({"worker": "a:1"}, WORKER_0, "is {'worker': 'a:1'}, which names no list"),
    (whole(WORKERS, ["worker", 0]), (), "no list of processes."),
    ({"ps": ["p:1"], **WORKERS}, WORKER_0, "ps cannot be here: the jobs are"),
    ({"evaluator": ["e:1"], "x": ["x:1"], **WORKERS}, WORKER_0, "evaluator, x can"),
    ({1: ["m:1"]}, ("master", 0), "1 cannot be here: the jobs are 'chief', once ca"),
    ({"chief": ["a:1", "b:2"]}, ("chief", 0), "cluster_spec: b:2 is one chief too"),
    ({"worker": ["a:1", "A:1"]}, WORKER_0, "a:1 stands for more than one task."),
    ({"chief": ["a:1"], "worker": ["a:1"]}, ("chief", 0), "a:1 stands for more"),
    ({"worker": ["a"]}, WORKER_0, "cluster_spec: worker[0]='a' is not an address."),
    ({"worker": [":1", 7]}, WORKER_0, "worker[0]=':1', worker[1]=7 is not an addr"),
    ({"worker": ["grpc://a:1"]}, WORKER_0, "worker[0]='grpc://a:1' is not an addr"),
    ({"worker": ["::1:22"]}, WORKER_0, "an IPv6 host stands in brackets, '[::1]:2"),
    ({"worker": ["a:65536"]}, WORKER_0, "Write 'host:port' with a port of 1 to 65"),
    (WORKERS, (), "the task of type None and index None is not in the cluster."),
    (whole(WORKERS, {"type": "worker"}), (), "type 'worker' and index None is not"),
    (FULL, WORKER_0, "Name the task once."),
    (WORKERS, ("chief", 0), "'chief' and index 0 is not in the cluster. Name one"),
    (WORKERS, ("worker", 2), "such as 'worker' and 0: [\"worker[0]='a:1'\", \"work"),
    (WORKERS, ("worker", "0"), "index '0' is not in the cluster. Name one of its"),
])  # fmt: skip
def test_a_wrong_spec_says_why(spec, task, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_spec(spec, *task)


def launched(process_id):
    names = {"COORDINATOR": "launched:1", "NUM_PROCESSES": "4"}
    names["PROCESS_ID"] = process_id
    return {f"TOWERJAX_{name}": value for name, value in names.items()}


LAUNCHED = launched("3")


@pytest.mark.parametrize("environ, explicit, says", [
    (launched(""), (), "Give TOWERJAX_PROCESS_ID too, or none of them."),
    (launched("4"), (), "towerjax launch: process_id=4 must be a whole number <= 3"),
    ({"TF_CONFIG": "{"}, (), "TF_CONFIG: '{' is not JSON (Expecting property name"),
    ({"TF_CONFIG": "[1]"}, (), "TF_CONFIG is [1], which names no list"),
    ({"TF_CONFIG": "{}"}, (), "TF_CONFIG is {}, which names no list"),
    ({}, ("a", 2, 0), "arguments: coordinator='a' is not an address."),
    ({}, ("a:1", 0, 0), "num_processes=0 must be a whole number >= 1."),
    ({}, ("a:1", 2, 2), "process_id=2 must be a whole number <= 1."),
    ({}, ("a:1", 2, None), "Give process_id too, or none of them."),
    ({}, (None, None, 0), "Give coordinator and num_processes too"),
])  # fmt: skip
def test_wrong_arguments_say_why(environ, explicit, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        find_cluster(environ, *explicit)


TASK_1 = {"type": "worker", "index": 1}
TF_CONFIG = {"TF_CONFIG": json.dumps(whole({"worker": ["tf:1", "tf:2"]}, TASK_1))}


@pytest.mark.parametrize("environ, explicit, expected", [
    (LAUNCHED | TF_CONFIG, ("arg:1", 9, 8), (8, 9, "arg:1", "explicit arguments")),
    (LAUNCHED | TF_CONFIG, (), (3, 4, "launched:1", "towerjax launch")),
    (TF_CONFIG, (), (1, 2, "tf:1", "TF_CONFIG")),
    ({"TF_CONFIG": "", "SLURM_JOB_ID": "1"}, (), None),
    ({}, (), None),
])  # fmt: skip
def test_the_first_source_counts(environ, explicit, expected):
    found = find_cluster(environ, *explicit)
    assert (found and dataclasses.astuple(found)) == expected


def test_a_port_is_free_until_somebody_listens():
    port = free_port()
    assert is_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
    assert is_loopback("localhost:1") and is_loopback("[::1]:1")
    assert not is_loopback("10.0.0.1:1")


def started(names, *values, **more):
    return dict(zip(names.split(), values, strict=True)) | more


TORCHRUN = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
OPEN_MPI = " ".join(
    f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
MPICH = "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"
SLURM = "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_NUM_NODES"
STEP = "SLURM_JOB_ID SLURM_STEP_ID SLURM_STEP_NODELIST"
MASTER = {"MASTER_ADDR": "host-a", "MASTER_PORT": "29500"}


def torchrun(*values, **more):
    return started(TORCHRUN, *values, **more)


def slurm(*values, of=("7", "0", "gpu[007-009],x1"), **more):
    return started(SLURM, *values, **started(STEP, *of), **more)


@pytest.mark.parametrize("environ, expected", [
    (torchrun("3", "4", "1", "2", "a", "5"), (3, 4, "a:5", "torchrun", [1])),
    (torchrun("3", "4", "0", "1", "a", "5"), (3, 4, "a:5", "torchrun", None)),
    (torchrun("0", "2", "0", "2", "a", "5", TORCHELASTIC_USE_AGENT_STORE="True"),
        (0, 2, "127.0.0.1:6", "torchrun", [0])),
    (started("RANK WORLD_SIZE", "1", "2", MASTER_ADDR="fd::1", MASTER_PORT="2222"),
        (1, 2, "[fd::1]:2222", "torchrun", None)),
    (started(OPEN_MPI, "1", "4", "1", "2", **MASTER),
        (1, 4, "host-a:29500", "Open MPI", [1])),
    (started(MPICH, "1", "2", "1", "2", JAX_COORDINATOR_ADDRESS="a:1", **MASTER),
        (1, 2, "a:1", "MPICH", [1])),
    (slurm("2", "3", "1", "2", **MASTER), (2, 3, "host-a:29500", "Slurm", [1])),
    # One process a device, which the launcher has chosen; or the user.
    (slurm("2", "3", "1", "2", CUDA_VISIBLE_DEVICES="1", **MASTER),
        (2, 3, "host-a:29500", "Slurm", None)),
    (slurm("2", "3", "1", "2", JAX_LOCAL_DEVICE_IDS="3", **MASTER),
        (2, 3, "host-a:29500", "Slurm", None)),
    # srun --mpi=pmi2, and mpirun or torchrun in each task of a step of two.
    (slurm("2", "3", "1", "2", PMI_RANK="2", PMI_SIZE="3", **MASTER),
        (2, 3, "host-a:29500", "Slurm", [1])),
    (slurm("1", "2", "0", "2", **torchrun("5", "8", "1", "4", "a", "5")),
        (5, 8, "a:5", "torchrun", [1])),
    # What started one process alone is no launcher.
    (slurm("1", "2", "0", "2", **torchrun("0", "1", "0", "1", "a", "5")),
        (1, 2, "a:5", "Slurm", [0])),
])  # fmt: skip
def test_what_a_launcher_says_is_a_cluster(environ, expected):
    assert refusal(environ, "this is none")
    found = started_cluster(environ)
    devices = own_devices(environ)
    place = found.process_id, found.num_processes, found.coordinator, found.how
    assert (*place, devices) == expected


@pytest.mark.parametrize("environ, method", [
    (slurm("0", "2", "0", "2"), "slurm"),
    (slurm("0", "2", "0", "2", PMI_RANK="0", PMI_SIZE="2"), "slurm"),
    (started(OPEN_MPI, "1", "4", "1", "2"), "ompi"),
    ({}, None),
    ({"PMIX_RANK": "1"}, None),
    (slurm("0", "1", "0", "1", SLURM_NTASKS="4"), "deactivate"),
    (started(MPICH, "0", "4", "0", "2"), "deactivate"),
    (torchrun("0", "2", "0", "1", "", ""), "deactivate"),
    # Several mpirun do not meet where Slurm's step does, which counts others.
    (slurm("0", "2", "0", "2", **started(MPICH, "0", "4", "0", "2")), "deactivate"),
    (slurm("0", "2", "0", "2", PMI_RANK="3", PMI_SIZE="4"), "deactivate"),
])  # fmt: skip
def test_what_jax_detects_is_left_to_it(environ, method):
    assert detection(environ) == method
    assert started_cluster(environ) is None


@pytest.mark.parametrize("environ, says", [
    (started(OPEN_MPI, "1", "4", "1", "2"),
        "OMPI_COMM_WORLD_SIZE=4 is the number of processes in a job of several, but"
        " nobody came: each would be a job of its own, and write the same files."
        " Set MASTER_ADDR and MASTER_PORT"),
    (started(MPICH, "0", "4", "0", "2"), "set PMI_SIZE to nothing."),
    (torchrun("0", "2", "0", "1", "", ""), "WORLD_SIZE=2 is the number of proc"),
    ({"PMIX_RANK": "1"}, "PMIX_RANK=1 is the number of this process in a job of"),
    ({"JOB_COMPLETION_INDEX": "3"}, "On Kubernetes install jax[k8s]."),
])  # fmt: skip
def test_several_that_do_not_meet_are_refused(environ, says):
    assert started_cluster(environ) is None
    assert says in str(refusal(environ, "nobody came"))


@pytest.mark.parametrize("environ", [
    {},
    torchrun("0", "1", "0", "1", "a", "5"),
    {"RANK": "8"},  # of a matrix
    {"WORLD_SIZE": "8", **MASTER},
    started("RANK WORLD_SIZE", "3", "", **MASTER),
    started(OPEN_MPI, "0", "1", "0", "1", PMIX_RANK="0"),
    {"JOB_COMPLETION_INDEX": "0"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # no step
    slurm("0", "1", "0", "1", SLURM_NTASKS="4"),
])  # fmt: skip
def test_one_process_is_no_job_of_several(environ):
    assert started_cluster(environ) is refusal(environ, "x") is own_devices(environ)
    assert forgotten(environ) is None
    assert started_cluster(environ) is None


WAY_OUT = "Call tj.cluster.initialize() at the start, before JAX is used. If each"


@pytest.mark.parametrize("environ, names", [
    (LAUNCHED, "TOWERJAX_COORDINATOR, TOWERJAX_NUM_PROCESSES, TOWERJAX_PROCESS_ID"),
    (TF_CONFIG, "TF_CONFIG"),
    ({"TF_CONFIG": json.dumps(whole({**WORKERS, "ps": ["p:1"]}, {"type": "ps"}))},
        "TF_CONFIG"),
    (torchrun("0", "2", "0", "2", "a", "5"), "WORLD_SIZE"),
    (started(OPEN_MPI, "1", "4", "1", "2"), "OMPI_COMM_WORLD_SIZE"),
    ({"PMIX_RANK": "1"}, "PMIX_RANK"),
    (started(MPICH, "0", "4", "0", "2"), "PMI_SIZE"),
    (slurm("0", "2", "0", "2"), "SLURM_STEP_NUM_TASKS"),
    (slurm("1", "2", "0", "2", SLURM_PTY_PORT="5"), "SLURM_STEP_NUM_TASKS"),
])  # fmt: skip
def test_several_of_which_none_joined_are_refused_by_a_strategy(
    environ, names, monkeypatch
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    text = forgotten(environ)
    for strategy in (tj.Mirrored(towers=2), tj.OneDevice(), tj.OneDevice("cpu:0")):
        with pytest.raises(RuntimeError, match=re.escape(WAY_OUT)) as caught:
            _ = strategy.placement
        assert str(caught.value) == text
    assert f"set {names} to nothing." in text
    assert re.match(r"\w+=\d is the n|TF_CONFIG names [23] processes of one", text)
    assert tj.Mirrored(devices=tj.Absent("h100", 2)).placement.num_towers == 2
    joined = Cluster(0, 1, "a:1", "explicit arguments")
    monkeypatch.setattr(start._process, "cluster", joined)
    assert tj.Mirrored(towers=2).placement
    monkeypatch.undo()
    for name in names.split(", "):
        monkeypatch.setenv(name, "")
    assert tj.Mirrored(towers=2).placement


@pytest.mark.parametrize("environ", [
    {"TF_CONFIG": "{"},
    {"TF_CONFIG": json.dumps(whole({"master": ["a:1"]}, {"type": "master"}))},
    {"TF_CONFIG": json.dumps(whole(WORKERS, {"type": "evaluator", "index": 0}))},
    {"TF_CONFIG": json.dumps(whole({"chief": ["a:1"], "evaluator": ["b:1"]}, {}))},
    {"TOWERJAX_COORDINATOR": "a:1", "TOWERJAX_NUM_PROCESSES": "1"},
    {"JOB_COMPLETION_INDEX": "3"},  # of an Indexed Job of independent pods
    slurm("0", "4", "0", "4", SLURM_PTY_PORT="5"),  # a shell's
])  # fmt: skip
def test_one_process_that_need_not_join_is_not_refused(environ):
    assert forgotten(environ) is None


def test_jax_must_count_as_many_processes(monkeypatch):
    monkeypatch.setattr(start, "_initialize_jax", lambda *_: None)
    for mine in (Cluster(1, 4, "a:1", "TF_CONFIG"), Cluster(1, 2, "a:1", "TF_CONFIG")):
        text = "TF_CONFIG: this is process 1 of .*0 of 1"
        with pytest.raises(RuntimeError, match=text):
            _join_cluster(mine, {})
    alone = Cluster(0, 1, f"127.0.0.1:{free_port()}", "TF_CONFIG")
    assert _join_cluster(alone, {}) == alone


def test_many_others_are_named_in_short():
    cluster = Cluster(0, 1000, "a:1", "x")
    assert _other_processes(cluster) == "processes 1, 2, 3, 4, 5, 6, 7, ..., 999"
