import json
import warnings

import keras
import numpy as np
import pytest
from backends import PRECISIONS, tensorflow_only
from keras import layers as L
from networks import sequential

import prunekit as pk
from prunekit.anatomy.cost.inspection import Event, SparsityReport, WeightRow, inspect
from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.anatomy.records.reports import Skipped

# Names and NumPy: two of the tests stand for all on other backends in the short suite.
pytestmark = pytest.mark.every_backend(cases=0)


def small():
    model = sequential(
        (6, 6, 2),
        L.Conv2D(4, 3, name="conv"),
        L.BatchNormalization(name="bn"),
        L.Flatten(),
        L.Dense(3, name="logits"),
        name="small",
    )
    for weight in weights_in(model):
        weight.variable.assign(np.ones(weight.shape, "float32"))
    return model


def by_name(report):
    return {row.name: row for row in report.weights}


@pytest.mark.every_backend
def test_every_weight_of_the_model_has_one_row_with_exact_figures():
    model = small()
    kernel = np.ones((64, 3), "float32")
    kernel.reshape(-1)[:50] = 0.0
    kernel.reshape(-1)[50:53] = -0.0
    kernel.reshape(-1)[53] = np.nan
    model.get_layer("logits").kernel.assign(kernel)
    report = inspect(model)
    assert [row.name for row in report.weights] == [
        "conv/kernel",
        "conv/bias",
        "bn/gamma",
        "bn/beta",
        "bn/moving_mean",
        "bn/moving_variance",
        "logits/kernel",
        "logits/bias",
    ]
    row = by_name(report)["logits/kernel"]
    assert (row.layer, row.role, row.shape, row.size, row.zeros) == ("logits", "kernel", (64, 3), 192, 53)
    assert (row.macs, row.sparse_macs, row.bytes) == (192, 139, 768)
    assert row.sparsity == 53 / 192
    assert by_name(report)["conv/kernel"].macs == 16 * 72
    assert report.parameters == model.count_params() == 287
    assert report.zeros == 53
    assert report.sparsity == 53 / 287
    assert report.macs == 192 + 16 * 72
    assert report.sparse_macs == 139 + 16 * 72
    assert report.bytes == 4 * 287
    assert (report.model_name, report.notes, report.skipped) == ("small", (), ())


@pytest.mark.every_backend
def test_the_pattern_of_the_zeros_is_named_along_the_weights_own_axes():
    model = small()
    kernel = np.ones((64, 3), "float32")
    kernel[0::4] = kernel[1::4] = 0
    kernel[0, 0], kernel[2, 0] = 1, 0
    model.get_layer("logits").kernel.assign(kernel)
    channels = np.ones((3, 3, 2, 4), "float32")
    channels[..., 1] = 0
    model.get_layer("conv").kernel.assign(channels)
    rows = by_name(inspect(model))
    assert (rows["logits/kernel"].pattern, rows["logits/kernel"].sparsity) == ("2:4", 0.5)
    assert rows["conv/kernel"].pattern == "channel"
    assert rows["bn/gamma"].pattern == "dense"


def test_shared_layers_and_their_weights_come_once():
    one, two = keras.Input((4,)), keras.Input((4,))
    shared = L.Dense(3, name="shared")
    report = inspect(keras.Model([one, two], [shared(one), shared(two)]))
    assert [row.name for row in report.weights] == ["shared/kernel", "shared/bias"]
    assert report.macs == 24


@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("bfloat16", 2), ("float64", 8), ("mixed_float16", 4)])
def test_bytes_follow_the_type_that_the_weights_are_stored_in(dtype, size):
    if dtype not in PRECISIONS and dtype == "float64":
        pytest.skip("JAX takes float64 for float32")
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, dtype=dtype)])
    assert inspect(model).bytes == 15 * size


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # from Keras' own quantize
def test_a_quantized_model_can_be_inspected():
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, name="dense")])
    kernel = np.ones((4, 3), "float32")
    kernel[0] = 0
    model.layers[0].kernel.assign(kernel)
    model.layers[0].quantize("int8")
    report = inspect(model)
    row = by_name(report)["dense/kernel"]
    assert (row.zeros, row.bytes, row.macs) == (3, 12, None)
    assert "(prunekit has no formula for the multiply-accumulates of Dense quantized to int8)" in report.notes[0]


def test_integer_and_boolean_and_scalar_and_empty_weights_are_rows_too():
    class Odd(L.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
            self.flags = self.add_weight(shape=(3,), dtype="bool", initializer="zeros", trainable=False)
            self.empty = self.add_weight(shape=(0, 3))

        def call(self, inputs):
            return inputs

    report = inspect(keras.Sequential([keras.Input((4,)), Odd(name="odd"), L.Dense(2, name="dense")]))
    rows = by_name(report)
    assert [(rows[f"odd/{name}"].size, rows[f"odd/{name}"].zeros) for name in ("count", "flags", "empty")] == [
        (1, 1),
        (3, 3),
        (0, 0),
    ]
    assert rows["odd/empty"].sparsity == 0.0
    assert [rows[f"odd/{name}"].bytes for name in ("count", "flags", "empty")] == [4, 3, 0]
    assert rows["odd/empty"].role == "unknown"
    assert report.notes == (
        "MACs are not known, and left out of the totals, for: odd (prunekit has no formula for the "
        "multiply-accumulates of Odd).",
    )
    assert rows["dense/kernel"].macs == 8


def test_a_layer_that_the_model_does_not_call_is_noted_with_that_reason():
    class Half(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.spare = L.Dense(2, name="used"), L.Dense(2, name="spare")
            self.used.build((None, 4))
            self.spare.build((None, 4))

        def call(self, inputs):
            return self.used(inputs)

    report = inspect(Half(), inputs=(1, 4))
    assert report.notes == ("MACs are not known, and left out of the totals, for: spare (the model did not call it).",)
    assert (report.macs, report.macs_complete) == (8, False)


def test_a_model_that_cannot_be_followed_is_still_inspected_and_is_noted():
    model = keras.Sequential([keras.Input((None, 4)), L.GRU(3, name="gru")])
    report = inspect(model)
    assert (report.macs, report.sparse_macs, report.macs_complete) == (None, None, False)
    assert report.parameters == model.count_params()
    (note,) = report.notes
    assert note.startswith("MACs are not known. The inputs of the model")
    assert note.endswith("such as inputs=(1, 128, 4) (--input-shape 1,128,4 on the command line).")
    assert json.loads(json.dumps(report.to_dict()))["macs"] is None
    rows = by_name(report)
    # A bias multiplies nothing, whatever the size of the inputs.
    assert (rows["gru/kernel"].macs, rows["gru/recurrent_kernel"].sparse_macs, rows["gru/bias"].macs) == (None, None, 0)
    last = str(report).splitlines()[-2].split()
    assert last[0] == "total" and last[-3:-1] == ["–", "–"]


def test_a_fixed_batch_does_not_change_the_figures_of_one_example():
    model = keras.Sequential([keras.Input(batch_shape=(4, 5, 3)), L.GRU(2, name="gru")])
    assert by_name(inspect(model))["gru/kernel"].macs == 5 * 18


def row(name, size, zeros):
    return WeightRow(name, name.split("/")[0], "kernel", (size,), size, zeros, "unstructured", 2 * size, size, 4 * size)


def full_report():
    before = SparsityReport("m", (row("a/kernel", 10, 0), row("b/kernel", 30, 0)))
    return SparsityReport(
        "m",
        (row("a/kernel", 10, 5), row("b/kernel", 30, 1)),
        skipped=(Skipped("a/bias", "a bias"), Skipped("b/bias", "a bias"), Skipped("c/bias", "a bias")),
        events=(Event(0, 0.25, 0.2), Event(10, 0.5, 0.5)),
        notes=("a note",),
        before=before,
        targets=("a/kernel",),
    )


def test_the_sparsity_of_the_targets_is_distinguished_from_the_models():
    report = full_report()
    assert report.target_sparsity == 0.5
    assert report.sparsity == 6 / 40
    assert report.before.target_sparsity == 0.0


def test_a_report_becomes_json_with_its_totals_and_the_one_before():
    loaded = json.loads(json.dumps(full_report().to_dict()))
    assert (loaded["zeros"], loaded["parameters"], loaded["target_sparsity"]) == (6, 40, 0.5)
    assert loaded["weights"][0]["sparsity"] == 0.5
    assert loaded["weights"][0]["shape"] == [10]
    assert loaded["before"]["zeros"] == 0
    assert loaded["before"]["before"] is None
    assert loaded["events"][1] == {"step": 10, "asked": 0.5, "reached": 0.5}
    assert loaded["skipped"][0] == {"name": "a/bias", "reason": "a bias"}


def test_the_text_is_an_aligned_table_with_totals():
    text = str(full_report())
    assert text.splitlines() == [
        "Model 'm'",
        "weight      shape  zeros  of  sparsity  pattern       MACs  sparse MACs  bytes",
        "-" * 78,
        "a/kernel *  10         5  10    0.5000  unstructured    20           10     40",
        "b/kernel    30         1  30    0.0333  unstructured    60           30    120",
        "-" * 78,
        "total                  6  40    0.1500                  80           40    160",
        "* pruned: 1 weights, sparsity 0.5000 in them",
        "before: 0 zeros, sparsity 0.0000",
        "skipped: a/bias, b/bias, c/bias: a bias",
        "note: a note",
    ]


@pytest.mark.one_backend
def test_many_skipped_weights_of_one_reason_are_one_line():
    report = SparsityReport("m", (), skipped=tuple(Skipped(f"l{index}/bias", "a bias") for index in range(40)))
    assert str(report).splitlines()[-1] == "skipped: l0/bias, l1/bias, l2/bias and 37 more: a bias"


@pytest.mark.one_backend
def test_an_empty_report_has_zero_everywhere():
    report = SparsityReport("nothing", ())
    assert (report.parameters, report.sparsity, report.target_sparsity, report.macs) == (0, 0.0, 0.0, 0)


@pytest.mark.one_backend
def test_what_is_no_built_model_is_refused():
    with pytest.raises(ValueError, match="not built"):
        inspect(keras.Sequential([L.Dense(2)]))
    with pytest.raises(TypeError, match="Keras 3 models"):
        inspect("model.keras")


# On PyTorch, Keras's conversion to NumPy emits it.
@tensorflow_only
def test_reports_and_one_shot_pruning_emit_no_warning_of_other_packages(perceptron):
    with warnings.catch_warnings():
        # The settings of pytest ignore a warning of NumPy 2 about TensorFlow variables.
        warnings.simplefilter("error")
        before, after = pk.inspect(perceptron), pk.prune(perceptron, 0.5, allocation="uniform")
    zeros = [sum(row.zeros for row in one.weights if row.name in after.targets) for one in (before, after)]
    assert zeros == [0, 96]


def tokens_and_mask():
    tokens, mask = keras.Input((None,), dtype="int32", name="tokens"), keras.Input((None,), name="mask")
    size = keras.Input((3,), name="size")
    embedded = L.Embedding(11, 4, name="embedding")(tokens) * mask[..., None]
    hidden = L.Dense(5, name="dense")(embedded)
    return keras.Model({"tokens": tokens, "mask": mask, "size": size}, [hidden, L.Dense(2, name="head")(size)])


@pytest.mark.parametrize(
    "inputs",
    [
        (1, 7),
        {"tokens": (1, 7), "mask": [9, 7]},
        {"tokens": (1, 7), "mask": (1, 7), "size": (1, 3)},
        {"tokens": (None, 7), "mask": np.ones((1, 7))},
        {"tokens": np.ones((2, 7), "int32"), "mask": np.ones((2, 7)), "size": np.ones((2, 3))},
        {name: keras.KerasTensor((1, 7), "int32") for name in ("tokens", "mask")} | {"size": keras.KerasTensor((1, 3))},
    ],
    ids=["one shape", "shapes", "all shapes", "a shape and an array", "arrays", "specifications"],
)
def test_the_size_of_the_inputs_is_given_by_arrays_or_by_shapes(inputs):
    model = tokens_and_mask()
    report = inspect(model, inputs=inputs)
    rows = by_name(report)
    assert (rows["dense/kernel"].macs, rows["head/kernel"].macs, rows["embedding/embeddings"].macs) == (7 * 20, 6, 0)
    assert (report.macs, report.macs_complete, report.notes) == (146, True, ())
    counted = pk.cost(model, batch_size=2, inputs=inputs)
    assert (counted.macs, counted.unknown) == (2 * 146, ())


@pytest.mark.one_backend
def test_shapes_of_a_list_of_inputs_and_of_a_layer_without_declared_inputs():
    one, two = keras.Input((None, 3)), keras.Input((4,))
    model = keras.Model([one, two], [L.Dense(2)(one), L.Dense(2)(two)])
    assert inspect(model, inputs=[(1, 5, 3), (1, 4)]).macs == 5 * 6 + 8
    assert inspect(model, inputs=(1, 5, 3)).macs == 5 * 6 + 8
    layer = L.Dense(2)
    layer.build((None, 3))
    assert inspect(layer, inputs=(1, 6, 3)).macs == 6 * 6


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"token": (1, 7), "mask": (1, 7)}, "inputs of the model are .*Received: 'token'.*Did you mean 'tokens'"),
        ({"tokens": (1, 7)}, "each input of open size. Missing: mask"),
        ({"tokens": (1, 7, 2), "mask": (1, 7)}, r"input 'tokens' is \(None, None\).*Received: \(1, 7, 2\)"),
        ((1, 7, 2), r"is \(None, .*Received: \(1, 7, 2\)"),
        ((1, 0), "positive sizes after the batch axis"),
        ((1, None), "positive sizes after the batch axis"),
        ([(1, 7), (1, 7)], "a shape for each of 3 inputs. Received: 2 shapes"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(inputs, message):
    model = tokens_and_mask()
    for count in (inspect, pk.cost):
        with pytest.raises(ValueError, match=message):
            count(model, inputs=inputs)


@pytest.mark.one_backend
def test_a_partly_known_total_is_at_least_what_is_known():
    class Custom(L.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 3))

        def call(self, inputs):
            return keras.ops.matmul(inputs, self.kernel)

    report = inspect(keras.Sequential([keras.Input((4,)), L.Dense(300, name="dense"), Custom(name="custom")]))
    assert (report.macs, report.macs_complete) == (1200, False)
    assert "at least 1,200" in str(report)
    assert report.to_dict()["macs_complete"] is False
    only = pk.cost(keras.Sequential([keras.Input((4,)), Custom(name="custom")]))
    assert (only.macs, only.sparse_macs, only.backward_macs) == (None, None, None)
    assert only.to_dict()["macs"] is None
