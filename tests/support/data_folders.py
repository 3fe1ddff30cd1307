"""Data as users have them, in small: folders of images, CSV files, saved data sets, and networks for them."""

import csv

import keras
import numpy as np
from PIL import Image

SCHEDULE = {"type": "polynomial_decay", "final_sparsity": 0.8, "end": {"epochs": 1}, "frequency": 2}


def write_images(folder, classes=("cat", "dog", "fox"), each=12, seed=0):
    """Images of different sizes, JPEG and PNG, in one folder per class."""
    random = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(each):
            pixels = random.integers(0, 256, (9 + i, 12, 3), dtype="uint8")
            Image.fromarray(pixels).save(folder / name / f"{i:02}.{'png' if i % 2 else 'jpg'}")
    return folder


def write_csv(path, header, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def houses(path, count=40, seed=0):
    """Two columns of numbers, a town, and a price."""
    random = np.random.default_rng(seed)
    rows = [
        [round(random.uniform(1, 9), 3), int(random.integers(20, 200)), ["Rome", "Oslo", "Bern"][i % 3], 100 + i / 4]
        for i in range(count)
    ]
    return write_csv(path, ["rooms", "area", "town", "price"], rows)


def pairs_of(count=40, shape=(4,), classes=3, seed=0, kind="float32"):
    random = np.random.default_rng(seed)
    whole = random.integers(0, 256, (count, *shape)) if kind == "uint8" else random.normal(size=(count, *shape))
    return whole.astype(kind), np.arange(count) % classes


def classifier(shape, classes=3):
    keras.utils.set_random_seed(20)
    layers = [
        keras.layers.Flatten(name="flat"),
        keras.layers.Dense(8, "relu", name="hidden"),
        keras.layers.Dropout(0.2, name="drop"),
        keras.layers.Dense(classes, "softmax", name="out"),
    ]
    return keras.Sequential([keras.Input(shape, name="x"), *layers], name="classifier")


def recipe(data, *steps, loss="sparse_categorical_crossentropy", metrics=("accuracy",), **others):
    prune = {"prune": {"epochs": 2, "schedule": SCHEDULE, "include": ["hidden"], "allocation": "uniform"}}
    return {
        "version": 1,
        "name": "data",
        "seed": 4,
        "data": data,
        "compile": {"optimizer": "adam", "loss": loss, "metrics": list(metrics), "batch_size": 8},
        "steps": list(steps) or [prune],
        **others,
    }
