"""Which cluster a process belongs to: every source, and every way to get it wrong."""

import json
import re

import pytest

from towerjax.mesh.cluster.spec import (
    SINGLE_PROCESS,
    Cluster,
    check_address,
    check_member,
    connection_error,
    find_cluster,
    free_port,
    is_free,
    is_loopback,
    manager_name,
    parse_json,
    parse_spec,
)

WORKERS = {"worker": ["a:1", "b:2"]}


@pytest.mark.parametrize(
    "jobs, task, expected",
    [
        (WORKERS, ("worker", 0), (0, 2, "a:1")),
        (WORKERS, ("worker", 1), (1, 2, "a:1")),
        ({**WORKERS, "chief": ["c:3"]}, ("chief", 0), (0, 3, "c:3")),
        ({**WORKERS, "chief": ["c:3"]}, ("worker", 1), (2, 3, "c:3")),
        ({**WORKERS, "chief": []}, ("worker", 0), (0, 2, "a:1")),
        ({"worker": ("[::1]:2222",)}, ("worker", 0), (0, 1, "[::1]:2222")),
        ({"chief": ["one:1"]}, ("chief", 0), (0, 1, "one:1")),
    ],
)
def test_the_chief_is_first_and_the_workers_follow(jobs, task, expected):
    found = parse_spec(jobs, *task)
    assert (found.process_id, found.num_processes, found.coordinator) == expected
    job, index = task
    whole = {"cluster": jobs, "task": {"type": job, "index": index}}
    assert parse_spec(whole) == found
    text = json.dumps({**whole, "environment": "cloud"})
    assert parse_json(text, how="cluster_spec") == found


def test_worker_10_comes_after_worker_2_as_listed():
    workers = [f"host-{i}:2222" for i in reversed(range(12))]
    found = [parse_spec({"worker": workers}, "worker", i) for i in range(12)]
    assert [cluster.process_id for cluster in found] == list(range(12))
    assert {cluster.coordinator for cluster in found} == {"host-11:2222"}


def one(address):
    return {"worker": [address]}


def whole(cluster, task):
    return {"cluster": cluster, "task": task}


WRONG_SPECS = [
    ((["a:1"],), "cluster_spec is ['a:1'], no mapping. Write such as {\"cluster\":"),
    (("a:1",), "cluster_spec is 'a:1', no mapping."),
    ((whole(["a:1"], None),), "'cluster' is ['a:1'], no mapping."),
    (({"task": {"type": "worker", "index": 0}},), "cluster_spec has no 'cluster'."),
    (({},), "the cluster {} has no tasks. Write such as"),
    (({"worker": []}, "worker", 0), "the cluster {'worker': []} has no tasks."),
    (({"ps": ["p:1"], **WORKERS}, "worker", 0), "job 'ps' cannot be here: towers keep"),
    (({"evaluator": ["e:1"], **WORKERS}, "worker", 0), "start it as a process of its"),
    (({"master": ["m:1"]}, "master", 0), "that job is called 'chief' here."),
    (({"wroker": ["m:1"]}, "wroker", 0), "the jobs are 'chief' and 'worker'."),
    (({"worker": "a:1"}, "worker", 0), "job 'worker' is 'a:1', which is not a list."),
    (({"worker": {"0": "a:1"}}, "worker", 0), "which is not a list. Write such as"),
    (({"chief": ["a:1", "b:2"]}, "chief", 0), "there are 2 chiefs, ['a:1', 'b:2'];"),
    (({"worker": ["a:1", "A:1"]}, "worker", 0), "a:1 stands for more than one task."),
    (({"chief": ["a:1"], "worker": ["a:1"]}, "chief", 0), "a:1 stands for more than"),
    ((one("a"), "worker", 0), "cluster_spec: worker[0]='a' is not an address."),
    ((one("a:"), "worker", 0), "worker[0]='a:' is not an address. Write 'host:port'"),
    ((one(":1"), "worker", 0), "worker[0]=':1' is not an address."),
    ((one("grpc://a:1"), "worker", 0), "worker[0]='grpc://a:1' is not an address."),
    ((one("a b:1"), "worker", 0), "worker[0]='a b:1' is not an address."),
    ((one("::1:22"), "worker", 0), "an IPv6 host stands in brackets, '[::1]:2222'."),
    ((one(7), "worker", 0), "worker[0]=7 is not an address."),
    ((one("a:0"), "worker", 0), "worker[0]='a:0' has port 0; a port is one of 1 to"),
    ((one("a:65536"), "worker", 0), "has port 65536; a port is one of 1 to 65535."),
    ((WORKERS,), "which task is this process? Got type None and index None; both"),
    ((WORKERS, "worker"), "Got type 'worker' and index None; both are needed"),
    ((WORKERS, None, 1), "Got type None and index 1; both are needed"),
    ((whole(WORKERS, {"type": "worker"}),), "Got type 'worker' and index None; both"),
    ((whole(WORKERS, {"index": 0}),), "Got type None and index 0; both are needed"),
    ((whole(WORKERS, None),), "which task is this process? Got type None"),
    ((whole(WORKERS, ["worker", 0]),), "'task' is ['worker', 0], no mapping"),
    ((whole(WORKERS, {"type": "worker", "index": 0}), "worker", 0), "Name the task on"),
    ((WORKERS, "chief", 0), "job 'chief', which the cluster does not have. Use one of"),
    ((WORKERS, ["worker"], 0), "this process is of job ['worker'], which the cluster"),
    ((WORKERS, "ps", 0), "does not have. Towers keep their parameters on every device"),
    ((WORKERS, "evaluator", 0), "does not have. The evaluator is not part of the job"),
    (
        (WORKERS, "worker", 2),
        "the index of the task=2 must be a whole number <= 1",
    ),
    ((WORKERS, "worker", -1), "the index of the task=-1 must be a whole"),
    (
        (one("a:1"), "worker", 1),
        "the index of the task=1 must be a whole number <= 0",
    ),
    (
        (WORKERS, "worker", "0"),
        "the index of the task='0' must be a whole number >= 0.",
    ),
    ((WORKERS, "worker", True), "the index of the task=True must be a whole"),
]


@pytest.mark.parametrize("arguments, says", WRONG_SPECS)
def test_a_wrong_spec_says_why(arguments, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_spec(*arguments)


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "TF_CONFIG: '{' is not JSON (Expecting property name"),
        ("[1]", "TF_CONFIG is [1], no mapping."),
        ("{}", "TF_CONFIG has no 'cluster'."),
        ('{"worker": ["a:1"]}', "TF_CONFIG has no 'cluster'."),
        ('{"cluster": {"ps": ["a:1"]}}', "TF_CONFIG: job 'ps' cannot be here"),
    ],
)
def test_a_wrong_tf_config_says_why(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        find_cluster({"TF_CONFIG": text})


@pytest.mark.parametrize(
    "values, says",
    [
        (("a", 2, 0), "explicit arguments: coordinator='a' is not an address."),
        (("a:1", 0, 0), "num_processes=0 must be a whole number >= 1."),
        (("a:1", True, 0), "num_processes=True must be a whole number >= 1."),
        (("a:1", "2", 0), "num_processes='2' must be a whole number >= 1."),
        (
            ("a:1", 2, 2),
            "process_id=2 must be a whole number <= 1.",
        ),
        (("a:1", 2, -1), "process_id=-1 must be a whole number >= 0"),
        (("a:1", 2, False), "process_id=False must be a whole number"),
        (
            ("a:1", 2, None),
            "there is only coordinator='a:1', num_processes=2. Give pro",
        ),
        (
            ("a:1", None, None),
            "Give num_processes and process_id too, or none of them.",
        ),
        ((None, None, 0), "there is only process_id=0. Give coordinator and num_proce"),
    ],
)
def test_wrong_arguments_say_why(values, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        find_cluster({}, explicit=values)


LAUNCHED = {
    "TOWERJAX_COORDINATOR": "launched:1",
    "TOWERJAX_NUM_PROCESSES": "4",
    "TOWERJAX_PROCESS_ID": "3",
}
TF_CONFIG = {
    "TF_CONFIG": json.dumps(
        {
            "cluster": {"worker": ["tf:1", "tf:2"]},
            "task": {"type": "worker", "index": 1},
        }
    )
}


@pytest.mark.parametrize(
    "environ, arguments, expected",
    [
        (
            {**LAUNCHED, **TF_CONFIG},
            {"explicit": ("arg:1", 9, 8)},
            Cluster(8, 9, "arg:1", "explicit arguments"),
        ),
        (
            {**LAUNCHED, **TF_CONFIG},
            {"spec": (WORKERS, "worker", 1)},
            Cluster(1, 2, "a:1", "cluster_spec"),
        ),
        (
            {**LAUNCHED, **TF_CONFIG},
            {},
            Cluster(3, 4, "launched:1", "towerjax launch"),
        ),
        ({**TF_CONFIG}, {}, Cluster(1, 2, "tf:1", "TF_CONFIG")),
        ({"TF_CONFIG": "", "SLURM_JOB_ID": "1"}, {}, None),
        ({}, {}, None),
    ],
)
def test_the_first_source_counts(environ, arguments, expected):
    assert find_cluster(environ, **arguments) == expected


def test_two_sources_among_the_arguments_are_refused():
    with pytest.raises(ValueError, match="Give one of the two"):
        find_cluster({}, explicit=("a:1", 2, 0), spec=(WORKERS, "worker", 0))


def test_a_task_without_a_cluster_is_refused():
    with pytest.raises(ValueError, match="task_id=0 are given without cluster_spec"):
        find_cluster(TF_CONFIG, spec=(None, "worker", 0))


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"TOWERJAX_PROCESS_ID": ""}, "Give TOWERJAX_PROCESS_ID too, or none of them."),
        (
            {"TOWERJAX_PROCESS_ID": "4"},
            "towerjax launch: process_id=4 must be a whole number <= 3",
        ),
        (
            {"TOWERJAX_NUM_PROCESSES": "two"},
            "TOWERJAX_NUM_PROCESSES='two' is not a num",
        ),
        (
            {"TOWERJAX_COORDINATOR": "x"},
            "towerjax launch: coordinator='x' is not an ad",
        ),
    ],
)
def test_wrong_variables_of_the_launcher_say_why(changes, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        find_cluster({**LAUNCHED, **changes})


@pytest.mark.parametrize(
    "environ, name",
    [
        ({"SLURM_JOB_ID": "1"}, "Slurm, detected by JAX"),
        ({"OMPI_MCA_orte_hnp_uri": "1"}, "Open MPI, detected by JAX"),
        ({"KUBERNETES_SERVICE_HOST": "1"}, "Kubernetes, detected by JAX"),
        ({}, "a cluster, detected by JAX"),
    ],
)
def test_what_jax_detects_has_a_name(environ, name):
    assert manager_name(environ) == name


def test_a_port_is_free_until_somebody_listens():
    import socket

    port = free_port()
    assert is_free(port)
    assert isinstance(connection_error(f"127.0.0.1:{port}", 1), ConnectionRefusedError)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
        assert connection_error(f"127.0.0.1:{port}", 1) is None
    assert is_loopback("localhost:1") and is_loopback("[::1]:1")
    assert not is_loopback("10.0.0.1:1")


def test_a_checked_address_is_returned():
    assert check_address("node-1.example.org:8000", "x") == "node-1.example.org:8000"
    assert check_member("a:1", 1, 0, how="x") == Cluster(0, 1, "a:1", "x")
    assert "one process" in SINGLE_PROCESS
