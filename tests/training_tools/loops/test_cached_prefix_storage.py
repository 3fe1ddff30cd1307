"""What a cached prefix keeps: computed once and never stale, within its limit, and on disk never trusted unchecked."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from prefix_models import built, data, frozen, same

import prunekit as pk
from prunekit.training_tools.loops.activation_cache import TooLargeError

# ---------------------------------------------------------------- computed once, never stale


def test_the_same_data_are_computed_once_and_other_data_are_not_mistaken_for_them():
    prefix = pk.loops.CachedPrefix(built("perceptron"))
    x, _, _ = data(prefix.model)
    first = prefix.activations(x)
    assert prefix.activations(x) is first
    assert prefix.activations(np.array(x)) is first
    assert prefix.activations(np.asfortranarray(x)) is first
    assert prefix.computed == 1
    other = np.array(x)
    other[-1, -1] += 1e-6
    assert not np.array_equal(prefix.activations(other), first)
    x[0] = 0
    assert np.array_equal(prefix.activations(x)[1:], first[1:]) and not np.array_equal(prefix.activations(x), first)
    assert prefix.computed == 3
    with pytest.raises(ValueError, match="read-only"):
        first[:] = 0


def test_a_name_replaces_the_hash_of_the_data():
    prefix = pk.loops.CachedPrefix(built("perceptron"))
    x, _, _ = data(prefix.model)
    first = prefix.activations(x, key="train")
    assert prefix.activations(x + 1, key="train") is first
    assert prefix.activations(x, key="test") is not first
    assert prefix.activations(x[:10], key="train").shape == (10, 16)


@pytest.mark.parametrize("change", ["a weight", "all weights", "a setting", "an average"])
def test_after_a_change_below_the_activations_are_computed_again(change):
    model = built("convolutional")
    prefix = pk.loops.CachedPrefix(model)
    x, _, _ = data(model)
    before = np.array(prefix.activations(x))
    if change == "a weight":
        kernel = model.get_layer("conv_1").kernel
        kernel.assign(np.where(np.arange(kernel.shape[-1]) == 0, 0, kernel))
    elif change == "all weights":
        model.set_weights([weight * 0.5 for weight in model.get_weights()])
    elif change == "an average":
        model.get_layer("norm").moving_mean.assign_add(np.ones(4))
    else:
        model.get_layer("conv_1").activation = keras.activations.tanh
    after = prefix.activations(x)
    assert prefix.computed == 2 and not np.array_equal(before, after)
    np.testing.assert_allclose(prefix.upper(after), model(x), rtol=1e-4, atol=1e-6)


def test_activations_of_former_weights_are_found_when_these_come_back():
    model = built("perceptron")
    prefix = pk.loops.CachedPrefix(model)
    x, _, _ = data(model)
    weights, first = model.get_weights(), prefix.activations(x)
    model.set_weights([weight + 1 for weight in weights])
    prefix.activations(x)
    model.set_weights(weights)
    assert prefix.activations(x) is first and prefix.computed == 2


def test_unfreezing_a_layer_below_is_refused_until_it_is_frozen_again():
    model = built("convolutional")
    prefix = pk.loops.CachedPrefix(model)
    x, _, _ = data(model)
    first = prefix.activations(x)
    for name, reason in (("conv_1", "trainable weights"), ("norm", "trainable weights")):
        model.get_layer(name).trainable = True
        with pytest.raises(ValueError, match=f"must stay frozen. Received: '{name}' has {reason}"):
            prefix.activations(x)
        model.get_layer(name).trainable = False
    assert prefix.activations(x) is first


def test_words_that_a_lookup_has_learnt_since_count_as_a_change():
    lookup = layers.StringLookup(vocabulary=["a", "b"], name="lookup")
    model = keras.Sequential(
        [keras.Input((2,), dtype="string"), lookup, frozen(layers.Embedding(4, 3, name="words")), layers.Dense(2)]
    )
    prefix = pk.loops.CachedPrefix(model)
    texts = np.array([["a", "b"], ["b", "c"]])
    before = prefix.activations(texts)
    lookup.set_vocabulary(["c", "b"])
    after = prefix.activations(texts)
    assert prefix.computed == 2 and not np.array_equal(before, after)
    with pytest.raises(ValueError, match="Python objects"):
        prefix.activations(texts.astype(object))


# ---------------------------------------------------------------- bounds


def test_memory_is_bounded_and_the_least_recently_used_go_first():
    prefix = pk.loops.CachedPrefix(built("perceptron"), limit=3 * 20 * 16 * 4)
    sets = [np.full((20, 8), number, "float32") for number in range(4)]
    for number in (0, 1, 2):
        prefix.activations(sets[number])
    prefix.activations(sets[0])
    prefix.activations(sets[3])
    assert prefix.computed == 4
    prefix.activations(sets[0])
    prefix.activations(sets[2])
    assert prefix.computed == 4
    prefix.activations(sets[1])
    assert prefix.computed == 5
    prefix.clear()
    prefix.activations(sets[1])
    assert prefix.computed == 6


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_data_set_above_the_limit_is_refused_with_the_figure_and_the_rest_stays(on_disk, tmp_path):
    prefix = pk.loops.CachedPrefix(built("perceptron"), limit=20 * 16 * 4, directory=tmp_path if on_disk else None)
    x = np.ones((21, 8), "float32")
    kept = prefix.activations(x[:20])
    with pytest.raises(TooLargeError, match="take 1,344 bytes, and the limit is 1,280. Received: limit=1280. Raise"):
        prefix.activations(x)
    with pytest.raises(TooLargeError, match="or more"):
        prefix.activations(tf.data.Dataset.from_tensor_slices(x).batch(7), key="x")
    assert same(prefix.activations(x[:20]), kept)
    if on_disk:
        assert len(list(tmp_path.iterdir())) == 1, "nothing half-written is left"


# ---------------------------------------------------------------- on disk


@pytest.mark.thorough
def test_files_are_found_by_another_process_and_read_as_memory_maps(tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'tests/support')\n"
        "import numpy as np, prunekit as pk, prefix_models as t\n"
        "model = t.built('residual'); x = t.data(model)[0]\n"
        f"prefix = pk.loops.CachedPrefix(model, directory={str(tmp_path)!r})\n"
        "found = prefix.activations(x)\n"
        "assert all(isinstance(array, np.memmap) for array in found)\n"
        "print(prefix.computed, [float(array.sum()) for array in found])\n"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    model = built("residual")
    prefix = pk.loops.CachedPrefix(model, directory=tmp_path)
    sums = [float(array.sum()) for array in prefix.activations(data(model)[0])]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == f"0 {sums}", done.stderr


def one_file(folder):
    (entry,) = folder.iterdir()
    return entry / "0"


@pytest.mark.parametrize("damage", ["cut off", "one bit", "no manifest", "no file", "another manifest", "nonsense"])
def test_a_damaged_file_is_computed_again_and_never_trusted(damage, tmp_path):
    model = built("perceptron")
    x, _, _ = data(model)
    whole = np.array(pk.loops.CachedPrefix(model, directory=tmp_path).activations(x))
    file = one_file(tmp_path)
    manifest = file.with_name("manifest.json")
    if damage == "cut off":
        file.write_bytes(file.read_bytes()[:-4])
    elif damage == "one bit":
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "no file":
        file.unlink()
    elif damage == "another manifest":
        manifest.write_text(manifest.read_text().replace('"key": "', '"key": "0'))
    else:
        manifest.write_text('{"key": [], "arrays"')
    prefix = pk.loops.CachedPrefix(model, directory=tmp_path)
    with pytest.warns(UserWarning, match="is damaged .* computed again"):
        assert np.array_equal(prefix.activations(x), whole)
    assert prefix.computed == 1
    again = pk.loops.CachedPrefix(model, directory=tmp_path)
    assert np.array_equal(again.activations(x), whole) and again.computed == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_costs_a_warning_and_not_the_activations(tmp_path):
    (tmp_path / "file").write_text("in the way")
    prefix = pk.loops.CachedPrefix(built("perceptron"), directory=tmp_path / "file")
    x, _, _ = data(prefix.model)
    with pytest.warns(UserWarning, match="cannot be written to disk .* kept in memory"):
        first = prefix.activations(x)
    assert prefix.activations(x) is first and prefix.computed == 1


def test_a_disk_that_is_full_in_the_middle_leaves_nothing_behind(tmp_path, monkeypatch):
    prefix = pk.loops.CachedPrefix(built("perceptron"), directory=tmp_path, batch_size=16)
    x, _, _ = data(prefix.model)
    import builtins

    class Full:
        def __init__(self, file):
            self.file, self.writes = file, 0

        def write(self, raw):
            self.writes += 1
            if self.writes == 3:
                raise OSError(28, "No space left on device")
            return self.file.write(raw)

        def close(self):
            self.file.close()

    original = builtins.open
    monkeypatch.setattr(
        builtins,
        "open",
        lambda path, mode="r", *rest, **named: (
            Full(original(path, mode)) if mode == "wb" else original(path, mode, *rest, **named)
        ),
    )
    with pytest.warns(UserWarning, match="No space left"):
        found = prefix.activations(x)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert np.array_equal(found, pk.loops.CachedPrefix(prefix.model).activations(x))
