"""Two steps on the batches of a Grain `ElasticIterator`, from where another job ended.

python tests/workers/elastic.py FOLDER

Each process writes the rows that it read, and where it stopped.
"""

import itertools
import json
import pathlib
import sys

import grain.python as grain
import numpy as np
import optax
from grain.experimental import ElasticIterator

import towerjax as tj

TOWERS = 8
ROWS = 96
BATCH = 16


def numbers():
    return grain.MapDataset.source(range(ROWS)).shuffle(seed=0)


def loss_fn(params, batch, tower):
    return tj.Weighted.mean(params * batch, tower.weight)


def main(folder):
    cluster = tj.cluster.initialize()
    name = f"{cluster.num_processes}.{cluster.process_id}"
    place = folder / "place"
    opened = []

    def make(context):
        shard = grain.ShardOptions(context.process_index, context.num_processes)
        iterator = ElasticIterator(numbers(), BATCH, shard)
        if place.exists():
            iterator.set_state(json.loads(place.read_text()))
        opened.append(iterator)
        return (read(rows) for rows in iterator)

    read_rows = []

    def read(rows):
        rows = np.asarray(rows, np.float32)
        read_rows.append(rows.astype(int).tolist())
        return rows

    strategy = tj.Mirrored(towers=TOWERS, prefetch_on_device=0)
    step = tj.build_train_step(loss_fn, optax.sgd(0.0), strategy)
    state = step.init(np.float32(1))
    sums = []
    batches = strategy.distribute_dataset(make)
    for batch in itertools.islice(batches, 2):
        state, metrics = step(state, batch)
        sums.append(round(float(metrics["loss"]) * BATCH))
    [iterator] = opened
    told = {"rows": read_rows, "sums": sums, "place": iterator.get_state()}
    (folder / f"told.{name}").write_text(json.dumps(told))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
