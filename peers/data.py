"""The samples that the Rust engines see, in PyTorch's own order of them.

Values are those of src/data; which rank sees which of them is torch.utils.data.DistributedSampler's.
"""

import csv
import gzip
import io
import math
import pathlib
import struct

import numpy as np
import torch
from torch.utils.data import DistributedSampler

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "data"
ODDS = (0.7, 0.9, 0.97)
CHAIN_SEED = 0x0DD5


def load(plan):
    """Inputs and targets of the training part."""
    source, seed = plan["data"]["source"], plan["run"]["seed"]
    kind = source["name"]
    if kind == "digits":
        inputs, targets = digits()
    elif kind == "mnist10k":
        inputs, targets = mnist()
    elif kind == "synthetic":
        inputs, targets = synthetic(source["shape"], source["classes"], source["samples"], seed)
    elif kind == "tokens":
        return tokens(source["context"], source["vocabulary"], source["samples"], seed)
    else:
        raise ValueError(f"data `{kind}` is not known here")
    images = plan["model"]["name"] in ("convnet", "resnet18")
    return (inputs if images else inputs.flatten(1)), targets


def digits():
    text = gzip.decompress((FOLDER / "digits.csv.gz").read_bytes()).decode()
    rows = np.array(list(csv.reader(io.StringIO(text))), dtype=np.int64)
    # Every tenth image is for testing.
    rows = torch.from_numpy(rows[np.arange(len(rows)) % 10 != 9])
    return rows[:, :64].float().div(16).reshape(-1, 1, 8, 8), rows[:, 64]


def mnist():
    images, labels = (idx(FOLDER / f"mnist10k-train-{part}.gz") for part in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    # In NumPy, whose single operations round as the Rust side's do.
    pixels = (images.astype(np.float32) / np.float32(255) - np.float32(0.1307)) / np.float32(0.3081)
    return torch.from_numpy(pixels).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))


def idx(path):
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def synthetic(shape, classes, samples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.empty(samples * math.prod(shape)).normal_(generator=generator)
    return inputs.reshape(samples, *shape), below(uniform(samples, generator), classes)


def tokens(context, vocabulary, samples, seed):
    chain = below(uniform(vocabulary * 4, torch.Generator().manual_seed(CHAIN_SEED)), vocabulary).reshape(-1, 4)
    dice = uniform(samples * (1 + context), torch.Generator().manual_seed(seed)).reshape(samples, -1)
    walk = [below(dice[:, 0], vocabulary)]
    odds = torch.tensor(ODDS, dtype=torch.float64)
    for step in range(1, context + 1):
        successor = (dice[:, step, None] >= odds).sum(1)
        walk.append(chain[walk[-1], successor])
    walk = torch.stack(walk, dim=1)
    return walk[:, :-1].contiguous(), walk[:, 1:].contiguous()


def uniform(count, generator):
    return torch.empty(count, dtype=torch.float64).uniform_(generator=generator)


def below(uniform, end):
    return (uniform * end).long()


class Length:
    """All that DistributedSampler asks of a data set."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples


def sampler_lists(samples, ranks, epoch, shuffle, drop_last, seed):
    """Every rank's indices in an epoch."""
    lists = []
    for rank in range(ranks):
        sampler = DistributedSampler(
            Length(samples), num_replicas=ranks, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        sampler.set_epoch(epoch)
        lists.append(list(sampler))
    return lists


def schedule(plan, samples):
    """Step after step for ever: the rows of each rank, and how many of them only fill up the epoch."""
    ranks, per_card = plan["run"]["cards"], plan["batch"]["per_card"]
    options = plan["data"]["shuffle"], plan["data"]["drop_last"], plan["run"]["seed"]
    epoch = 0
    while True:
        lists = sampler_lists(samples, ranks, epoch, *options)
        for first in range(0, len(lists[0]), per_card):
            rows = [indices[first : first + per_card] for indices in lists]
            # Row `i` of rank `r` is sample `i * ranks + r` of the epoch.
            repeated = [
                sum((first + i) * ranks + rank >= samples for i in range(len(part))) for rank, part in enumerate(rows)
            ]
            yield rows, repeated
        epoch += 1
