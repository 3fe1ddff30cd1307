"""Calls that are refused in one line: models that compute on integers, names that a call does not have, paths."""

from dataclasses import replace

import numpy as np
import pytest
from networks import dense_network

import prunekit as pk

X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
OPERATIONS = {
    "prune": lambda model, folder: pk.prune(model, 0.5),
    "shrink": lambda model, folder: pk.shrink(model, channels=0.5),
    "simplify": lambda model, folder: pk.simplify(model),
    "remove_blocks": lambda model, folder: pk.remove_blocks(model, 1, X),
    "sensitivity": lambda model, folder: pk.sensitivity(model, X),
    "quantize": lambda model, folder: pk.quantize(model, X),
    "prune_in_rounds": lambda model, folder: pk.prune_in_rounds(model, lambda model: None, 0.5),
    "export": lambda model, folder: pk.export(model, folder / "net.tflite", X),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_model_that_computes_on_integers_is_refused(name, tmp_path):
    model = dense_network(8, hidden=6, out=3)
    with (
        pk.quantize(model, X).simulating(),
        pytest.raises(RuntimeError, match=r"computes in floating point. Received: .* inside `simulating\(\)`"),
    ):
        OPERATIONS[name](model, tmp_path)
    assert not list(tmp_path.iterdir())
    OPERATIONS["prune"](dense_network(8, hidden=6, out=3), tmp_path)


def test_weights_that_moved_are_not_simulated():
    model = dense_network(8, hidden=6, out=3)
    first = pk.quantize(model, X)
    second = pk.quantize(model, X, bits=4)
    with pytest.raises(ValueError, match="Received: .*hidden/kernel.* with other values"), first.simulating():
        pass
    with second.simulating() as simulated:
        assert simulated.predict(X, verbose=0).shape == (32, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: pk.prune(model, 0.5, repar="none"), "'repar'. .* Did you mean 'repair'"),
        (lambda model: pk.prune(model, 0.5, compat="tfmot"), "'compat'. .* It is now 'policy=\"tfmot\"'"),
        (lambda model: pk.shrink(model, channel=0.5), "'channel'. .* Did you mean 'channels'"),
        (lambda model: pk.quantize(model, X, memry=1), "Did you mean 'memory'"),
        (lambda model: pk.choose_bits(model, X, candidates=4), "It is now 'bits'"),
        (lambda model: pk.QuantizationCallback(X, freze_step=2), "Did you mean 'freeze_step'"),
        (lambda model: pk.PruningCallback(0.5, patern="2:4"), "Did you mean 'pattern'"),
        (lambda model: pk.Pruner(model, pk.schedules.OneShot(0.5), optimiser=None), "Did you mean 'optimizer'"),
    ],
)
def test_a_name_that_a_call_does_not_have_is_answered_with_all_that_it_has(call, message):
    model = dense_network(8, hidden=6, out=3)
    before = model.get_weights()
    with pytest.raises(TypeError, match=f"Unknown option. .*{message}"):
        call(model)
    for one, two in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("net", ["litert"], X), TypeError, r"such as \[\"litert\"\], the argument after `data`. Received: array"),
        (("net.onnx", X), ValueError, 'A file ends with ".keras" or ".tflite". Received: \'net.onnx\''),
        ((None, X), TypeError, "`path` is the name of a file or a folder. Received: None"),
        (("net", [X, X], ["litert"]), ValueError, "an array for each input of the model, 1 in all. Received: 2"),
        (("net.tflite", "x.npy"), TypeError, "Received: the path 'x.npy'. Load the file first"),
        (("/proc/x", X, ["litert"]), ValueError, "`path` is a folder that you may write to. Received: '/proc/x'"),
        (("/proc/x/net.keras", X), ValueError, "`path` is a file in a folder that you may write to"),
    ],
    ids=["former order", "another format", "no path", "two arrays", "path of data", "folder", "file"],
)
def test_an_export_is_refused_before_a_file_is_written(arguments, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        pk.export(dense_network(8, out=3), *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1. Received: batch_size=0"),
        ({"keep_going": 2}, "`keep_going` is True or False. Received: 2"),
    ],
)
def test_a_wrong_option_of_an_export_is_refused(options, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        pk.export(dense_network(8, out=3), tmp_path / "net.tflite", X, **options)
    assert not list(tmp_path.iterdir())


def test_labels_beside_the_inputs_are_left_out(tmp_path):
    model = dense_network(8, hidden=6, out=3)
    alone, pair = (pk.export(model, tmp_path / "net.keras", data) for data in (X, (X, np.zeros(32))))
    # A Keras file has the second in which it was written, and with it other bytes after gzip.
    rows = [replace(one[0], gzip_bytes=0) for one in (alone, pair)]
    assert rows[0] == rows[1] and alone[0].status == "ok"
    done = pk.quantize(model, X)
    alone, pair = (done.export(tmp_path / "net.keras", data=data) for data in (X, (X, np.zeros(32))))
    assert alone.simulation == pair.simulation


@pytest.mark.parametrize(
    "call",
    [
        lambda model, one: pk.prune(model, 0.5, progress=one),
        lambda model, one: pk.shrink(model, channels=0.5, progress=one),
        lambda model, one: pk.quantize(model, X, progress=one),
        lambda model, one: pk.remove_blocks(model, 1, X, progress=one),
        lambda model, one: pk.sensitivity(model, X, progress=one),
        lambda model, one: pk.cluster(model, 4, X, progress=one),
        lambda model, one: pk.choose_bits(model, X, budget=500, progress=one),
        lambda model, one: pk.choose_bits(model, X, floor=0.5, evaluate=one),
        lambda model, one: pk.export(model, "/proc/x.tflite", X, measure=one),
        lambda model, one: pk.compress("one-shot", model, progress=one),
        lambda model, one: pk.sweep("one-shot", {"sparsity": [0.5]}, "/proc/x", progress=one),
    ],
    ids=[
        "prune",
        "shrink",
        "quantize",
        "remove_blocks",
        "sensitivity",
        "cluster",
        "budget",
        "floor",
        "export",
        "compress",
        "sweep",
    ],
)
def test_what_is_no_function_is_refused_at_once(call):
    with pytest.raises(TypeError, match="`(progress|measure|evaluate)` is a function or None. Received: 3 of type int"):
        call(dense_network(8, hidden=6, out=3), 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda model: pk.Pruner(model, 0.5),
            ValueError,
            r"Pass pk.schedules.PolynomialDecay\(final_sparsity=0.5, end",
        ),
        (lambda model: pk.Pruner(model, 0.5), ValueError, r"or pk.schedules.ConstantSparsity\(0.5\)"),
        (lambda model: pk.schedules.PolynomialDecay(0.9), ValueError, "To end at 0.9, pass final_sparsity=0.9"),
        (lambda model: pk.prune(model, 0.5, criterion="wanda"), ValueError, 'criterion="wanda" needs calibration data'),
        (lambda model: pk.prune(model, 0.5, "x.npy"), TypeError, "Received: the path 'x.npy'. Load the file first"),
        (
            lambda model: pk.remove_blocks(model, X),
            TypeError,
            r"The data follow it: pk.remove_blocks\(model, 1, data\)",
        ),
        (
            lambda model: pk.compress("one-shot", model, overrides=3),
            TypeError,
            "`overrides` maps variables of the recipe",
        ),
        (
            lambda model: pk.shrink(model, channels=0.5, minimum=100),
            ValueError,
            "minimum=100 and multiple=1, no channel can be removed. Received: channels=0.5. Pass smaller ones",
        ),
    ],
)
def test_an_error_says_what_was_meant(call, error, message):
    with pytest.raises(error, match=message):
        call(dense_network(8, hidden=6, out=3))


def test_reports_are_properties_and_short():
    model = dense_network(8, hidden=6, out=3)
    model.compile("sgd", "mse")
    with pk.Pruner(model, pk.schedules.OneShot(0.5)) as pruner:
        pass
    assert pruner.finish() == pruner.report and len(repr(pruner.report)) < 160 < len(str(pruner.report))
    with pytest.warns(DeprecationWarning, match="`report` is now a property"):
        assert pruner.report() == pruner.report
    with pk.Quantizer(model, X) as quantizer, pytest.raises(RuntimeError, match="once the Quantizer has finished"):
        quantizer.report  # noqa: B018
    assert quantizer.report is quantizer.finish()


def test_a_model_that_is_none_is_refused(tmp_path):
    with pytest.raises(TypeError, match="works on Keras 3 models. Received: <class 'str'>. Load a file first"):
        pk.export("net.keras", tmp_path / "net.tflite")


def test_a_word_for_the_channels_is_answered_with_the_one_that_is_known():
    with pytest.raises(ValueError, match="in \\(0, 1\\], or \"nonzero\". Received: 'zero'"):
        pk.shrink(dense_network(8, hidden=6, out=3), channels="zero")


def test_a_class_that_moved_is_named_and_internals_are_not_listed():
    with pytest.raises(AttributeError, match="no attribute 'Wanda'. It is prunekit.criteria.Wanda"):
        pk.Wanda  # noqa: B018
    assert {name for name in dir(pk) if not name.startswith("__")} == {*pk.__all__} - {"__version__"}


@pytest.mark.parametrize("inputs", [(8,), (1, 7), "x"], ids=["no batch", "another length", "text"])
@pytest.mark.parametrize(
    "call",
    [
        lambda model, inputs: pk.shrink(model, channels=0.5, inputs=inputs),
        lambda model, inputs: pk.inspect(model, inputs=inputs),
    ],
    ids=["shrink", "inspect"],
)
def test_inputs_that_do_not_fit_are_refused(call, inputs):
    with pytest.raises((TypeError, ValueError), match="Received: "):
        call(dense_network(8, hidden=6, out=3), inputs)


def test_labels_that_are_no_numbers_are_named():
    model = dense_network(8, hidden=6, out=3)
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="Labels number the classes. Received: labels that are NaN or infinite"):
        pk.sensitivity(model, (X, np.full(32, np.nan, "float32")))
