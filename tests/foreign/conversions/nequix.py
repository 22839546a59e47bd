"""Train nequix for some steps: `train` as it is, on structures that are made here.

Run in a checkout by `python -m tests.foreign`; ``towers`` is 0 as published.
"""

import json
import sys
import tempfile
import types
from typing import Any

import jax
import numpy as np

ROWS = 16  # structures a step, on all devices


def logger(logs: list[dict[str, Any]]) -> types.ModuleType:
    """What stands in for wandb: it keeps what is logged."""
    fake: Any = types.ModuleType("wandb")
    fake.run = types.SimpleNamespace(dir=tempfile.mkdtemp(), summary={}, id=None)
    fake.init = lambda **_: None
    fake.log = lambda values, step: logs.append(values)
    return fake


def main(devices: int, towers: int) -> None:
    """Print the numbers of the last step and of the evaluation."""
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_x64", True)
    logs: list[dict[str, Any]] = []
    sys.modules["wandb"] = logger(logs)
    hooks: Any = types.ModuleType("wandb_osh.hooks")
    hooks.TriggerWandbSyncHook = lambda: lambda: None
    sys.modules |= {"wandb_osh": types.ModuleType("wandb_osh"), hooks.__name__: hooks}

    import ase  # type: ignore
    import yaml
    from ase.calculators.singlepoint import SinglePointCalculator  # type: ignore
    from nequix import data, train  # type: ignore

    class Structures(data.Dataset):
        """Eighty clusters of 2 to 9 atoms in a box."""

        def __init__(
            self, file_path: str, atomic_numbers: list[int], cutoff: float, **how: Any
        ):
            super().__init__(**how)
            self.indices = data.atomic_numbers_to_indices(atomic_numbers)
            self.numbers = atomic_numbers
            self.cutoff = cutoff

        def __len__(self) -> int:
            return 80

        def _get_graph_dict(self, idx: int) -> dict[str, Any]:
            draw = np.random.default_rng(int(idx))
            count = int(draw.integers(2, 10))
            atoms = ase.Atoms(
                numbers=draw.choice(self.numbers, count),
                positions=draw.uniform(0, 4, (count, 3)),
                cell=[4, 4, 4],
                pbc=True,
            )
            stress = draw.normal(size=(3, 3))
            atoms.calc = SinglePointCalculator(
                atoms,
                energy=draw.normal() * count,
                forces=draw.normal(size=(count, 3)),
                stress=stress + stress.T,
            )
            return data.preprocess_graph(atoms, self.indices, self.cutoff, True)

    class Loader(data.DataLoader):
        """In this process, where theirs has 16 of its own."""

        def _start_workers(self) -> None:
            pass

        def make_generator(self) -> Any:
            yield from (self.dataset[int(index)] for index in self.idxs)

    train.AseDBDataset = Structures
    train.DataLoader = Loader
    jax.device_put_replicated = lambda tree, found: jax.tree.map(  # gone from JAX
        lambda x: jax.numpy.stack([x] * len(found)), tree
    )
    config = {
        "train_path": "", "valid_frac": 0.2, "atomic_numbers": [1, 6, 8],
        "atom_energies": {1: 0.0, 6: 0.0, 8: 0.0}, "cutoff": 3.0, "shift": 0.0,
        "scale": 1.0, "avg_n_neighbors": 8.0, "max_n_nodes": 10, "max_n_edges": 400,
        "avg_n_nodes": 10, "avg_n_edges": 400, "hidden_irreps": "4x0e",
        "lmax": 1, "n_layers": 1, "radial_basis_size": 4, "radial_mlp_size": 8,
        "radial_mlp_layers": 1, "radial_polynomial_p": 2.0, "mlp_init_scale": 4.0,
        "index_weights": True, "layer_norm": True, "kernel": False,
        "optimizer": "adamw", "learning_rate": 0.01, "warmup_factor": 0.2,
        "warmup_epochs": 0.1, "n_epochs": 1, "grad_clip_norm": 100.0,
        "weight_decay": 0.001, "energy_weight": 20.0, "force_weight": 20.0,
        "stress_weight": 5.0, "loss_type": "mae", "ema_decay": 0.999, "log_every": 1,
        "batch_size": ROWS // (towers or devices), "towers": towers,
    }  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        train.train(file.name)
    steps = [values for values in logs if "train/loss" in values]
    last = {**steps[-1], **logs[-1]}
    names = ("train/loss", "train/grad_norm", "val/loss", "val/force_mae")
    print(json.dumps({name: float(last[name]) for name in names}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
