"""Streamed data on several replicas: the weights of one replica, up to rounding."""

import numpy as np
import pytest
import tensorflow as tf
import yaml
from clusters import run, run_workers
from data_folders import classifier, pairs_of, recipe, write_images

from prunekit.anatomy.files.digests import weight_arrays
from prunekit.recipe.run.runner import compress
from prunekit.recipe.state.models import load_model

pytestmark = pytest.mark.thorough


def images(folder):
    return {"images": str(write_images(folder / "images")), "size": [4, 3], "scale": 255}, (4, 3, 3)


def saved(folder):
    tf.data.Dataset.from_tensor_slices(pairs_of(shape=(2, 2), kind="uint8")).save(str(folder / "saved"))
    return {"tfds_saved": str(folder / "saved"), "shuffle_buffer": 16}, (2, 2)


@pytest.fixture(params=[images, saved], ids=["images", "saved"])
def on_disk(request, tmp_path):
    """Function that writes the recipe with a kind of distribution, and the weights of one replica."""
    source, shape = request.param(tmp_path)
    model = classifier(shape)
    # Random units differ between replicas.
    model = type(model)([layer for layer in model.layers if layer.name != "drop"])
    model.build((None, *shape))
    model.save(tmp_path / "in.keras")
    text = recipe(source, model={"file": str(tmp_path / "in.keras")})

    def written(kind):
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(text | {"distribute": kind}))
        return str(tmp_path / f"{kind}.yaml")

    return written, weight_arrays(compress(text, output=tmp_path / "one").model)


def assert_as_one(directory, one):
    found = weight_arrays(load_model(directory / "model.keras"))
    for name, value in one.items():
        np.testing.assert_array_equal(found[name] == 0, value == 0)
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)


def test_mirrored_ends_like_one_replica_and_is_verified(on_disk, tmp_path):
    written, one = on_disk
    program = (
        "from distributed_training import split_cpu\n"
        "split_cpu(2)\n"
        "from prunekit.cli import run\n"
        f"code = run(['compress', {written('mirrored')!r}, '-o', {str(tmp_path / 'run')!r}])\n"
        f"raise SystemExit(code or run(['verify', {str(tmp_path / 'run')!r}]))"
    )
    assert "reproduced, bit for bit" in run("-c", program)
    assert_as_one(tmp_path / "run", one)


def test_workers_end_like_one_replica(on_disk, tmp_path):
    written, one = on_disk
    both = run_workers(2, "-m", "prunekit.cli", "compress", written("multi_worker"), "-o", tmp_path / "run")
    assert [each.code for each in both] == [0, 0], both[0].output[-2000:]
    assert_as_one(tmp_path / "run", one)
