"""Which cluster a process belongs to: every source, and every way to get it wrong."""

import json
import re
import socket

import pytest

from towerjax.mesh.cluster.spec import (
    Cluster,
    find_cluster,
    free_port,
    is_free,
    is_loopback,
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
    of_text = find_cluster({"TF_CONFIG": text})
    assert (of_text.process_id, of_text.num_processes) == expected[:2]


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
    (
        (["a:1"],),
        "cluster_spec is ['a:1'], which names no list of processes. Write such",
    ),
    ((whole(["a:1"], None),), 'no list of processes. Write such as {"cluster":'),
    (({"task": {"type": "worker", "index": 0}},), "no list of processes."),
    (({"worker": []}, "worker", 0), "leave all of it out for a job of one process."),
    (({"worker": "a:1"}, "worker", 0), "is {'worker': 'a:1'}, which names no list"),
    ((whole(WORKERS, ["worker", 0]),), "no list of processes."),
    (({"ps": ["p:1"], **WORKERS}, "worker", 0), "job 'ps' cannot be here: towers keep"),
    (({"evaluator": ["e:1"], **WORKERS}, "worker", 0), "start it as a process of its"),
    (({"master": ["m:1"]}, "master", 0), "that job is called 'chief' here."),
    (({"wroker": ["m:1"]}, "wroker", 0), "the jobs are 'chief' and 'worker'."),
    (({"chief": ["a:1", "b:2"]}, "chief", 0), "several chiefs, ['a:1', 'b:2']. Make"),
    (({"worker": ["a:1", "A:1"]}, "worker", 0), "a:1 stands for more than one task."),
    (({"chief": ["a:1"], "worker": ["a:1"]}, "chief", 0), "a:1 stands for more than"),
    ((one("a"), "worker", 0), "cluster_spec: worker[0]='a' is not an address."),
    ((one(":1"), "worker", 0), "worker[0]=':1' is not an address."),
    ((one("grpc://a:1"), "worker", 0), "worker[0]='grpc://a:1' is not an address."),
    ((one("::1:22"), "worker", 0), "an IPv6 host stands in brackets, '[::1]:2222'."),
    ((one(7), "worker", 0), "worker[0]=7 is not an address."),
    ((one("a:65536"), "worker", 0), "Write 'host:port' with a port of 1 to 65535"),
    (
        (WORKERS,),
        "the task of type None and index None, but the cluster has ('worker',",
    ),
    (
        (whole(WORKERS, {"type": "worker"}),),
        "type 'worker' and index None, but the clu",
    ),
    ((whole(WORKERS, {"type": "worker", "index": 0}), "worker", 0), "Name the task on"),
    ((WORKERS, "chief", 0), "'chief' and index 0, but the cluster has ('worker', 0)"),
    (
        (WORKERS, "worker", 2),
        "index 2, but the cluster has ('worker', 0), ('worker', 1)",
    ),
    ((WORKERS, "worker", "0"), "index '0', but the cluster has ('worker', 0)"),
]


@pytest.mark.parametrize("arguments, says", WRONG_SPECS)
def test_a_wrong_spec_says_why(arguments, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_spec(*arguments)


@pytest.mark.parametrize(
    "environ, arguments, says",
    [
        ({"TF_CONFIG": "{"}, {}, "TF_CONFIG: '{' is not JSON (Expecting property name"),
        ({"TF_CONFIG": "[1]"}, {}, "TF_CONFIG is [1], which names no list"),
        ({"TF_CONFIG": "{}"}, {}, "TF_CONFIG is {}, which names no list"),
        (
            {},
            {"explicit": ("a", 2, 0)},
            "arguments: coordinator='a' is not an address.",
        ),
        (
            {},
            {"explicit": ("a:1", 0, 0)},
            "num_processes=0 must be a whole number >= 1.",
        ),
        ({}, {"explicit": ("a:1", 2, 2)}, "process_id=2 must be a whole number <= 1."),
        ({}, {"explicit": ("a:1", 2, None)}, "Give process_id too, or none of them."),
        ({}, {"explicit": (None, None, 0)}, "Give coordinator and num_processes too"),
        (
            {},
            {"explicit": ("a:1", 2, 0), "spec": (WORKERS, "worker", 0)},
            "one of the t",
        ),
        (
            {},
            {"spec": (None, "worker", 0)},
            "cluster_spec goes with task_type and task",
        ),
    ],
)
def test_wrong_arguments_say_why(environ, arguments, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        find_cluster(environ, **arguments)


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


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"TOWERJAX_PROCESS_ID": ""}, "Give TOWERJAX_PROCESS_ID too, or none of them."),
        ({"TOWERJAX_PROCESS_ID": "4"}, "process_id=4 must be a whole number <= 3"),
    ],
)
def test_wrong_variables_of_the_launcher_say_why(changes, says):
    with pytest.raises(ValueError, match=f"towerjax launch: .*{says}"):
        find_cluster({**LAUNCHED, **changes})


def test_a_port_is_free_until_somebody_listens():
    port = free_port()
    assert is_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
    assert is_loopback("localhost:1") and is_loopback("[::1]:1")
    assert not is_loopback("10.0.0.1:1")
