"""Where is it written which cluster this process belongs to?"""

from collections.abc import Mapping
from typing import Any

from towerjax.mesh.cluster.launcher import VARIABLES
from towerjax.mesh.cluster.spec import Cluster, check_member, parse_json, parse_spec

NONE_NAMED = "one process: nothing in the environment names a cluster"
_MANAGERS = {
    "SLURM_JOB_ID": "Slurm",
    "OMPI_MCA_orte_hnp_uri": "Open MPI",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
}


def find_cluster(
    environ: Mapping[str, str],
    *,
    explicit: tuple[Any, Any, Any] = (None, None, None),
    spec: tuple[Any, Any, Any] = (None, None, None),
) -> Cluster | None:
    """The cluster that the arguments or the environment name; None if neither does.

    The first of these that is there counts: ``explicit``, ``spec``, the variables of
    ``towerjax launch``, ``TF_CONFIG``.
    """
    names = ("coordinator", "num_processes", "process_id")
    if any(value is not None for value in explicit):
        if any(value is not None for value in spec):
            raise ValueError(
                "Both coordinator, num_processes, process_id and cluster_spec,"
                " task_type, task_id are given. Give one of the two."
            )
        _check_complete(dict(zip(names, explicit, strict=True)), "arguments")
        return check_member(*explicit, how="explicit arguments")
    if any(value is not None for value in spec):
        if spec[0] is None:
            raise ValueError(
                f"task_type={spec[1]!r} and task_id={spec[2]!r} are given without"
                " cluster_spec. Give it too, or set TF_CONFIG and leave these out."
            )
        return parse_spec(*spec, how="cluster_spec")
    launched = {name: environ.get(name) for name in VARIABLES}
    if any(launched.values()):
        return _launched(launched)
    if environ.get("TF_CONFIG"):
        return parse_json(environ["TF_CONFIG"], how="TF_CONFIG")
    return None


def manager_name(environ: Mapping[str, str]) -> str:
    """What runs the cluster that JAX found, for people to read."""
    found = [name for key, name in _MANAGERS.items() if key in environ]
    return f"{(found or ['a cluster'])[0]}, detected by JAX"


def _check_complete(values: Mapping[str, Any], kind: str) -> None:
    missing = [name for name, value in values.items() if value in (None, "")]
    if missing:
        given = ", ".join(f"{k}={v!r}" for k, v in values.items() if k not in missing)
        raise ValueError(
            f"Of the {kind} {', '.join(values)} there is only {given}. Give"
            f" {' and '.join(missing)} too, or none of them."
        )


def _launched(values: Mapping[str, Any]) -> Cluster:
    _check_complete(values, "variables")
    coordinator, *numbers = values.values()
    for name, number in zip(VARIABLES[1:], numbers, strict=True):
        if not number.isdecimal():
            raise ValueError(
                f"{name}={number!r} is not a number. `towerjax launch` sets it; where"
                " something else does, write such as '0'."
            )
    return check_member(coordinator, *map(int, numbers), how="towerjax launch")
