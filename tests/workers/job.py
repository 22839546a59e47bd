"""One process of a job: joins it, sums over all devices, and then does as told.

python job.py '{"num_processes": 2, ...}' sum|raise|loop|again
python job.py '[[{"num_processes": 2, ...}, {"XLA_FLAGS": "..."}], null]' tries
"""

import json
import os
import sys
import time

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import towerjax as tj

arguments, task = json.loads(sys.argv[1]), sys.argv[2]


def error_of(arguments, variables):
    """What it says to call it so, with variables of the environment."""
    before = dict(os.environ)
    os.environ.update(variables)
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    try:
        tj.cluster.initialize(**arguments)
    except (ValueError, RuntimeError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(before)
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


if task == "tries":
    said = [error_of(*each) if each else len(jax.devices()) for each in arguments]
    sys.exit(print(json.dumps(said)))
cluster = tj.cluster.initialize(**arguments)
mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
total = jax.jit(
    jax.shard_map(
        lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P("all"), out_specs=P()
    )
)
rows = np.full(jax.local_device_count(), 1.0 + cluster.process_id, np.float32)
x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("all")), rows)


def step():
    return float(total(x)[0])


first = step()  # Gloo says its lines on stdout during the first one
print(flush=True)
print(
    f"process {cluster.process_id} of {cluster.num_processes} from {cluster.how}:"
    f" {jax.device_count()} devices, sum {first:g}, chief {tj.cluster.is_chief()},"
    f" same {tj.cluster.initialize(**arguments) == cluster}, pid {os.getpid()}",
    flush=True,
)
if task == "raise" and cluster.process_id == 1:
    raise ArithmeticError("the loss is a fish")
while task in ("raise", "loop"):
    step()
    time.sleep(0.01)
if task == "again":
    another = {"coordinator": "127.0.0.1:1", "num_processes": 2, "process_id": 1}
    print(error_of(another, {}))
    tj.cluster.shutdown()
    print("all came", flush=True)
