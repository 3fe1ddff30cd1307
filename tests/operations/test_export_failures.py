"""Exports that fail: what crashes, disagrees or cannot be written is not left on disk, and the reason is told."""

import os
import re
import shutil
import tempfile

import keras
import numpy as np
import pytest
from backends import converts, tensorflow_only
from exported_networks import KINDS, left_in
from keras import layers

from prunekit.delivery.litert import isolated_run, litert, probe
from prunekit.operations import export as export_module
from prunekit.operations.export import export

# Keras's own conversion of a variable to NumPy, whenever a model is saved.
pytestmark = [converts, pytest.mark.every_backend]


@tensorflow_only
def test_a_layer_that_lite_rt_lacks_is_reported_and_the_rest_ships(tmp_path):
    inputs = keras.Input((3, 3))
    model = keras.Model(inputs, layers.Dense(2)(Determinant()(inputs)))
    rows = export(model, tmp_path, np.eye(3)[None].repeat(4, 0), ["litert", "keras", "litert-sparse"])
    assert [row.status for row in rows] == ["failed", "ok", "failed"]
    assert "the conversion failed" in rows[0].note and "MatrixDeterminant" in rows[0].note
    assert left_in(tmp_path) == ["model.keras"]


@keras.saving.register_keras_serializable("test_export")
class Determinant(layers.Layer):
    def call(self, inputs):
        return keras.ops.reshape(keras.ops.det(inputs), (-1, 1))


@tensorflow_only
@pytest.mark.parametrize(
    "script, reason",
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"crashes the LiteRT interpreter \(SIGSEGV\)"),
        ("raise RuntimeError('failed to delegate')", "does not run: RuntimeError: failed to delegate"),
        ("import time; time.sleep(30)", "does not finish within 1 s"),
    ],
    ids=["crash", "error", "hang"],
)
def test_a_file_that_crashes_or_hangs_is_reported_and_removed(
    perceptron, samples, tmp_path, monkeypatch, script, reason
):
    worker, folder = tmp_path / "worker.py", tmp_path / "out"
    worker.write_text(script)
    monkeypatch.setattr(probe, "__file__", str(worker))
    monkeypatch.setattr(isolated_run, "_SECONDS", 1 if "sleep" in script else 60)
    (row,) = export(perceptron, folder, samples[0], ["litert"])
    assert row.status == "failed"
    assert re.search(reason, row.note)
    assert left_in(folder) == []


@tensorflow_only
def test_a_file_with_other_numbers_is_not_shipped_and_does_not_replace_the_last_good_one(
    perceptron, samples, tmp_path, monkeypatch
):
    export(perceptron, tmp_path, samples[0], ["litert-float16"])
    good = (tmp_path / "model-float16.tflite").read_bytes()
    weights = perceptron.get_weights()
    perceptron.set_weights([-weight for weight in weights])
    specs = litert.input_specs(perceptron, samples[0])
    (tmp_path / "traced").mkdir()
    wrong = litert.convert(litert.trace(perceptron, samples[0], specs, tmp_path / "traced"))
    shutil.rmtree(tmp_path / "traced")
    perceptron.set_weights(weights)
    monkeypatch.setattr(export_module, "convert", lambda *args, **options: wrong)
    (row,) = export(perceptron, tmp_path, samples[0], ["litert-float16"])
    assert row.status == "failed" and row.file is None and row.max_error > 0.1
    assert "disagrees with the Keras model on the first 4 samples" in row.note
    assert "is from an earlier export" in row.note
    assert (tmp_path / "model-float16.tflite").read_bytes() == good and len(left_in(tmp_path)) == 1


def test_a_model_that_answers_all_samples_alike_is_shipped_with_a_warning(perceptron, samples, tmp_path):
    perceptron.get_layer("logits").kernel.assign(np.zeros((16, 4)))
    rows = export(perceptron, tmp_path, samples[0], KINDS)
    assert all(row.status == "ok" and "proves little" in row.note for row in rows)


def test_a_model_that_gives_nan_is_not_shipped(perceptron, samples, tmp_path):
    perceptron.get_layer("logits").bias.assign([np.nan, 0, 0, 0])
    rows = export(perceptron, tmp_path, samples[0], KINDS)
    assert all(row.status == "failed" and "itself gives NaN" in row.note for row in rows)


def test_a_keras_file_that_needs_unsafe_loading_is_not_shipped(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.Lambda(lambda x: x * 2), layers.Dense(2)])
    (row,) = export(model, tmp_path, np.ones((2, 3)), ["keras"])
    assert row.status == "failed" and "does not load in safe mode" in row.note
    assert left_in(tmp_path) == []


@keras.saving.register_keras_serializable("test_export")
class Forgetful(layers.Dense):
    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.bias.assign(self.bias + 1)


def test_a_keras_file_that_comes_back_with_other_weights_is_not_shipped_and_the_last_good_one_stays(tmp_path):
    export(keras.Sequential([keras.Input((3,)), layers.Dense(2)]), tmp_path, np.ones((2, 3)), ["keras"])
    good = (tmp_path / "model.keras").read_bytes()
    model = keras.Sequential([keras.Input((3,)), Forgetful(2)])
    (row,) = export(model, tmp_path, np.ones((2, 3)), ["keras"])
    assert row.status == "failed" and "the weights in the file differ from the model's weights" in row.note
    assert left_in(tmp_path) == ["model.keras"] and (tmp_path / "model.keras").read_bytes() == good


def test_a_keras_file_of_lora_layers_is_refused_with_their_names(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, name="adapted"), layers.Dense(2)])
    model.layers[0].enable_lora(2)
    (row,) = export(model, tmp_path, np.ones((2, 3)), ["keras"])
    assert row.status == "failed" and "Keras saves LoRA weights as a part of the kernel" in row.note
    assert ": adapted. " in row.note and left_in(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_refused(perceptron, samples, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"Received: '.*folder', which cannot be written: .*file is not a folder"):
        export(perceptron, tmp_path / "file" / "folder", samples[0], KINDS)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(perceptron, samples, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ValueError, match="Permission denied"):
            export(perceptron, tmp_path, samples[0], KINDS)
    finally:
        tmp_path.chmod(0o700)


def test_a_keras_file_needs_no_folder_for_temporary_files_and_lite_rt_says_that_it_has_none(
    perceptron, samples, tmp_path, monkeypatch
):
    def nowhere(*arguments, **options):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", nowhere)
    rows = export(perceptron, tmp_path, samples[0], KINDS)
    assert rows[0].status == "ok"
    assert all(row.status == "failed" and "No usable temporary directory" in row.note for row in rows[1:])


@tensorflow_only
def test_a_folder_for_temporary_files_that_is_full_is_named_with_the_remedy(perceptron, samples, tmp_path, monkeypatch):
    import tensorflow as tf

    def full(*arguments, **options):
        raise tf.errors.ResourceExhaustedError(None, None, "variables.data: No space left on device")

    monkeypatch.setattr(tf.saved_model, "save", full)
    kept, row = export(perceptron, tmp_path, samples[0], ["keras", "litert"])
    assert kept.status == "ok" and row.status == "failed"
    assert re.search(
        r"cannot be written to /.*No space left on device\. Set TMPDIR to a folder with more free space", row.note
    )


def test_a_full_disk_is_reported_and_leaves_nothing(perceptron, samples, tmp_path, monkeypatch):
    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module.os, "replace", full)
    rows = export(perceptron, tmp_path, samples[0], KINDS)
    assert all(row.status == "failed" and "No space left on device" in row.note for row in rows)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("name, near", [("lite-rt", "litert"), ("litert_sparse", "litert-sparse"), ("kears", "keras")])
@pytest.mark.one_backend
def test_an_unknown_format_is_refused_with_the_nearest(perceptron, samples, tmp_path, name, near):
    with pytest.raises(ValueError, match=f"Did you mean '{near}'"):
        export(perceptron, tmp_path, samples[0], ["keras", name])
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"formats": "keras"}, TypeError, "must be a list of names"),
        ({"data": np.zeros((0, 8))}, ValueError, "one or more examples"),
        ({"data": [np.zeros((2, 8))] * 2}, ValueError, "each input of the model, 1 in all. Received: 2"),
        ({"data": np.zeros((2, 5))}, ValueError, r"The shape of the input is \(None, 8\)"),
        ({"labels": np.zeros(3)}, ValueError, "for each of the 70 examples"),
        ({"name": "../model"}, ValueError, "plain file name"),
        ({"model": keras.Sequential([layers.Dense(2)])}, ValueError, "is not built, so it has no weights"),
        ({"formats": []}, ValueError, "A folder needs formats, .* Received: .* without formats"),
        ({"path": "net.tflite"}, ValueError, r"A file has one format, that of its ending. .* formats=\['keras'\]"),
        ({"path": "net.keras", "formats": ["keras", "litert"]}, ValueError, "A file has one format"),
    ],
)
@pytest.mark.one_backend
def test_arguments_that_do_not_fit_are_refused(perceptron, samples, tmp_path, change, error, message):
    arguments = {"model": perceptron, "path": tmp_path, "formats": ["keras"], "data": samples[0]} | change
    with pytest.raises(error, match=message):
        export(**arguments)
