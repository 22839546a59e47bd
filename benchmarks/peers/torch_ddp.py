"""Time PyTorch's ``DistributedDataParallel``, with a process for each device."""

import importlib
import json
import math
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.peers.same_work import Job, as_figures, job_of, timed_rounds
from benchmarks.peers.trials import NUM_LOSSES, SECONDS_PER_ROUND, Trial
from benchmarks.steps import LEARNING_RATE, MOMENTUM
from towerjax.sweeps.bench import check_losses, describe_machine
from towerjax.sweeps.turns import calls_in


def run(trial: Trial) -> dict[str, Any]:
    """Measure a trial in one process for each device; the first process reports."""
    # JAX takes most of a GPU's memory, which PyTorch needs.
    jax.config.update("jax_platforms", "cpu")
    torch = importlib.import_module("torch")
    on_gpu = torch.cuda.is_available()
    job = job_of(trial, torch.cuda.get_device_name(0) if on_gpu else "cpu")
    spawn = importlib.import_module("torch.multiprocessing").spawn
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (job, folder), nprocs=trial.devices)
        found = json.loads((pathlib.Path(folder) / "figures").read_text())
    check_losses(trial.by, found["losses"], job.expected, 1e-4)
    return found


def _rank(rank: int, job: Job, folder: str) -> None:
    torch = importlib.import_module("torch")
    count = job.trial.devices
    on_gpus = torch.cuda.device_count() >= count
    torch.set_num_threads(max(1, describe_machine()["cores"] // count))
    torch.distributed.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=count,
    )
    where = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    step = _built(torch, job, rank, where)
    losses = []
    for _ in range(NUM_LOSSES):
        loss = step() / count
        torch.distributed.all_reduce(loss)
        losses.append(float(loss))
    calls = _same_calls(torch, job, step, where)
    table = timed_rounds(step, calls)
    if rank == 0:
        text = json.dumps(as_figures(job, losses, calls, table))
        (pathlib.Path(folder) / "figures").write_text(text)
    torch.distributed.destroy_process_group()


def _same_calls(torch: Any, job: Job, step: Callable[[], Any], where: Any) -> int:
    """Return how many calls fit into a round on the slowest rank."""
    calls = calls_in(SECONDS_PER_ROUND, [step])
    least = torch.tensor(calls, device=where)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    return int(least)


def _built(torch: Any, job: Job, rank: int, where: Any) -> Callable[[], Any]:
    """Build a rank's step; each call waits for the rank's device."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(_as_torch, job.params))
    losses_of = _mlp_losses if job.trial.model == "mlp" else _cnn_losses

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tensors = [torch.nn.Parameter(torch.tensor(x)) for x in leaves]
            self.leaves = torch.nn.ParameterList(tensors)

        def forward(self, batch: Any) -> Any:
            return losses_of(
                torch, jax.tree.unflatten(treedef, list(self.leaves)), batch
            )

    ids = [where.index] if where.type == "cuda" else None
    parallel = torch.nn.parallel.DistributedDataParallel
    network = parallel(Network().to(where), device_ids=ids)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
    )
    rows = job.trial.batch // job.trial.devices
    batch = {
        name: torch.tensor(_as_torch(x)[rank * rows : (rank + 1) * rows]).to(where)
        for name, x in job.batch.items()
    }

    def step() -> Any:
        optimizer.zero_grad()
        loss = network(batch).mean()
        loss.backward()
        optimizer.step()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return loss.detach()

    return step


def _as_torch(x: Any) -> Any:
    """Return ``x`` in PyTorch's layout: OIHW kernels, NCHW images, int64 labels."""
    if x.ndim == 4:
        is_kernel = x.shape[:2] == (3, 3)
        return x.transpose((3, 2, 0, 1) if is_kernel else (0, 3, 1, 2)).copy()
    return x.astype("int64") if x.dtype.kind == "i" else x


def _mlp_losses(torch: Any, params: Any, batch: Any) -> Any:
    x = batch["x"]
    for layer in params:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return ((x - batch["y"]) ** 2).mean(dim=-1)


def _cnn_losses(torch: Any, params: Any, batch: Any) -> Any:
    functional = torch.nn.functional
    x = batch["image"]
    for stride, kernel in enumerate(params["convs"], 1):
        # XLA's "SAME" puts the odd row or column of padding at the end.
        total = (math.ceil(x.shape[-1] / stride) - 1) * stride + 3 - x.shape[-1]
        before = total // 2
        after = total - total // 2
        x = functional.pad(x, (before, after, before, after))
        x = torch.relu(functional.conv2d(x, kernel, stride=stride))
    logits = x.mean(dim=(2, 3)) @ params["dense"]
    return functional.cross_entropy(logits, batch["label"], reduction="none")
