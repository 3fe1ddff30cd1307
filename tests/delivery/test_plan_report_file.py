"""Plan, report and file name the same layers in floating point, over every linear layer, activation and bias."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers as L

import prunekit as pk
from prunekit.delivery.integers.integer_report import IntegerExportError
from prunekit.techniques.quantize.after_training import planned_quantization
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.placement import units
from prunekit.techniques.quantize.placement.rules import RoundingRule

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
WHOLE = [
    ("relu", None),
    ("relu6", None),
    ("gelu", None),
    ("sigmoid", None),
    (None, "relu"),
    (None, "relu6"),
    (None, None),
]
# In floating point: LiteRT has no kernel.
ACTIVATIONS = [*WHOLE, ("softplus", None), (None, "softplus")]
BIASES = ("none", "zeros", "some", "normalized")


def convolutions(rank):
    """Returns {name: (layer type, arguments)} of the convolutions with one or two spatial axes."""
    found = {
        "plain": (f"Conv{rank}D", {"padding": "same"}),
        "strided": (f"Conv{rank}D", {"strides": 2}),
        "dilated": (f"Conv{rank}D", {"padding": "same", "dilation_rate": 2}),
        "depthwise": (f"DepthwiseConv{rank}D", {"padding": "same"}),
        "dilated depthwise": (f"DepthwiseConv{rank}D", {"dilation_rate": 2, "depth_multiplier": 2}),
        "separable": (f"SeparableConv{rank}D", {"padding": "same"}),
        "dilated separable": (f"SeparableConv{rank}D", {"padding": "same", "dilation_rate": 2}),
        "transposed": (f"Conv{rank}DTranspose", {"padding": "same", "strides": 2}),
        "transposed, valid": (f"Conv{rank}DTranspose", {"strides": 2}),
        "transposed, without stride": (f"Conv{rank}DTranspose", {"padding": "same"}),
        "transposed, longer": (f"Conv{rank}DTranspose", {"strides": 2, "padding": "same", "output_padding": 1}),
    }
    if rank == 1:
        found |= {"causal": ("Conv1D", {"padding": "causal"})}
        found |= {"dilated causal": ("Conv1D", {"padding": "causal", "dilation_rate": 2})}
    else:
        found |= {"grouped": ("Conv2D", {"groups": 2})}
    return {name: (getattr(L, kind), _sizes(kind) | options) for name, (kind, options) in found.items()}


def _sizes(kind):
    return {"kernel_size": 3} | ({} if kind.startswith("Depthwise") else {"filters": 4})


def products(*equations):
    """Returns {name: (layer type, arguments)} of equations, output shapes without the batch axis and axes of biases."""
    return {
        f"{equation}, {bias}": (L.EinsumDense, {"equation": equation, "output_shape": outputs, "bias_axes": bias})
        for equation, outputs, bias in equations
    }


# Shape of the input -> {name: (layer type, arguments)}.
FAMILIES = {
    "images": ((8, 8, 4), convolutions(2) | products(("abcd,ce->abed", (8, 3, 4), "e"))),
    "sequences": ((8, 4), convolutions(1)),
    "products": (
        (8, 4),
        products(
            ("abc,cd->abd", (8, 5), "d"),
            ("abc,cde->abde", (8, 2, 3), "de"),
            ("abc,cde->adbe", (2, 8, 3), "de"),
            ("abc,bd->adc", (5, 4), "d"),
            ("abc,bd->acd", (4, 5), "d"),
            ("abc,bcd->abd", (8, 5), "bd"),
            ("abc,bcd->ad", (5,), "d"),
            # The bias lies along an axis that the kernel does not have.
            ("abc,bd->adc", (5, 4), "c"),
        ),
    ),
    "vectors": ((6,), {"dense": (L.Dense, {"units": 5})} | products(("ab,bc->ac", (5,), "c"))),
}
# Activations, with a bias each, that every layer of a family has in one file.
FEW = [
    ((None, "relu"), "none"),
    ((None, "relu6"), "normalized"),
    (("relu", None), "zeros"),
    (("softplus", None), "some"),
]


def branches(family, pairs):
    """Returns a model with an output for each layer of a family with each activation and bias, and inputs."""
    keras.utils.set_random_seed(0)
    shape, kinds = FAMILIES[family]
    x = keras.Input(shape, name="x")
    outputs = []
    for (kind, options), ((inside, behind), bias) in itertools.product(kinds.values(), pairs):
        outputs.append(_branch(x, kind, options, inside, behind, bias))
    inputs = np.random.default_rng(1).normal(size=(4, *shape)).astype("float32")
    return keras.Model(x, outputs), inputs


def _branch(x, kind, options, inside, behind, bias):
    name = f"branch_{keras.backend.get_uid('branch')}"
    options = dict(options)
    axes = options.pop("bias_axes", None)
    if kind is L.EinsumDense:
        options["bias_axes"] = axes if bias in ("zeros", "some") else None
    else:
        options["use_bias"] = bias in ("zeros", "some")
    if bias == "some":
        options["bias_initializer"] = keras.initializers.RandomNormal(stddev=0.5)
    y = kind(activation=inside, name=name, **options)(x)
    if bias == "normalized" and inside is None:
        # Its offsets are zero before a training.
        y = L.BatchNormalization(name=f"{name}_norm")(y)
    return L.Activation(behind, name=f"{name}_behind")(y) if behind else y


def in_floating_point(listed):
    """Returns the names of layers that a file lists."""
    return sorted(one.name for one in listed)


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_plan_report_and_file_name_the_same_layers_in_floating_point(family, tmp_path):
    _check(family, FEW, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "bits"), [(0, 8), (1, 16), (2, 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_do_so_for_each_activation(family, first, bits, tmp_path):
    biases = itertools.islice(itertools.cycle(BIASES), first, None)
    _check(family, list(zip(ACTIVATIONS, biases, strict=False)), tmp_path, activation_bits=bits)


def _check(family, pairs, folder, **options):
    model, inputs = branches(family, pairs)
    planned = sorted(one.name for one in planned_quantization(model, QuantizationOptions(**options)).skipped)
    done = pk.quantize(model, inputs, **options)
    made = done.export(folder / "m.tflite")
    reported = sorted(one.name for one in done.skipped)
    assert planned == reported == in_floating_point(made.skipped)
    softplus = sum("softplus" in one for one, _ in pairs) * len(FAMILIES[family][1])
    assert len(planned) >= softplus > 0
    assert made.largest_difference <= 1


def blocks_of_pixels(lengths, pairs):
    """Returns a model with `space_to_depth` before convolutions and `depth_to_space` behind each, and inputs."""
    keras.utils.set_random_seed(0)
    x = keras.Input((*lengths, 4), name="x")
    deep, outputs = keras.ops.space_to_depth(x, 2), []
    for number, ((inside, behind), bias) in enumerate(pairs):
        wide = keras.ops.depth_to_space(
            _branch(deep, L.Conv2D, {"filters": 8, "kernel_size": 1}, inside, None, bias), 2
        )
        y = L.Activation(behind, name=f"behind_{number}")(wide) if behind else wide
        outputs.append(L.Conv2D(2, 1, name=f"end_{number}")(y))
    inputs = np.random.default_rng(1).normal(size=(4, 8, 6, 4)).astype("float32")
    return keras.Model(x, outputs), inputs


@pytest.mark.parametrize(
    ("lengths", "bits", "moved"),
    [((8, 6), 8, 0), ((8, 6), 16, 0), ((None, None), 8, 0), ((None, None), 16, 5)],
    ids=["8 bits", "16 bits", "8 bits, any length", "16 bits, any length"],
)
def test_they_name_the_same_moves_of_blocks_of_pixels(lengths, bits, moved, tmp_path):
    model, inputs = blocks_of_pixels(lengths, FEW)
    planned = sorted(one.name for one in planned_quantization(model, QuantizationOptions(activation_bits=bits)).skipped)
    done = pk.quantize(model, inputs, activation_bits=bits)
    made = done.export(tmp_path / "m.tflite")
    assert planned == sorted(one.name for one in done.skipped) == in_floating_point(made.skipped)
    assert sum("space" in one for one in planned) == moved and any("branch" in one for one in planned)
    assert made.largest_difference <= 1


@pytest.mark.parametrize("bias", [False, True])
def test_relus_behind_dilated_and_transposed_convolutions_are_integers_after_training(bias, tmp_path):
    x = keras.Input((8, 8, 3), name="x")
    dilated = L.ReLU(name="a")(L.Conv2D(4, 3, dilation_rate=2, use_bias=bias)(x))
    wide = L.ReLU(6.0, name="b")(L.Conv2DTranspose(4, 3, strides=2, use_bias=bias)(x))
    pooled = [L.GlobalAveragePooling2D()(one) for one in (dilated, wide)]
    model = keras.Model(x, L.Dense(2)(L.Concatenate()(pooled)))
    model.compile("sgd", "mse")
    inputs = np.random.default_rng(1).normal(size=(8, 8, 8, 3)).astype("float32")
    callback = pk.QuantizationCallback(inputs, misfits="error")
    model.fit(inputs, np.zeros((8, 2)), epochs=1, batch_size=4, verbose=0, callbacks=[callback])
    assert callback.report.export(tmp_path / "m.tflite").skipped == ()


def test_a_file_with_parts_in_floating_point_that_the_report_lacks_is_refused_or_says_so(tmp_path, monkeypatch):
    # A rule that promises an integer kernel which LiteRT does not have.
    monkeypatch.setitem(units.rule_of.__globals__["_ACTIVATIONS"], "softplus", RoundingRule("own"))
    x = keras.Input((6,), name="x")
    model = keras.Model(x, L.Dense(3)(L.Activation("softplus", name="act")(L.Dense(4)(x))))
    inputs = np.random.default_rng(1).normal(size=(8, 6)).astype("float32")
    made = pk.quantize(model, inputs).export(tmp_path / "m.tflite")
    assert any("not in the report" in one and "act" in one for one in made.notes)
    with pytest.raises(IntegerExportError, match='misfits="error".*act'):
        pk.quantize(model, inputs, misfits="error").export(tmp_path / "n.tflite")
    assert not (tmp_path / "n.tflite").exists()
