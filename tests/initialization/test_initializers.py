"""Initial weights: moments, fans and orthogonality against NumPy and SciPy, masks, seeds."""

import itertools
import json
import math

import keras
import numpy as np
import pytest
from keras import layers
from reinitialized_models import built, kernels, wide

from prunekit.anatomy.layers.fans import fans
from prunekit.anatomy.layers.targets import find_targets
from prunekit.initialization import initializers
from prunekit.initialization.sampling import CUT_DEVIATION

SCALED = {
    "XavierUniform": (initializers.XavierUniform, lambda fan_in, fan_out: 2 / (fan_in + fan_out)),
    "XavierNormal": (initializers.XavierNormal, lambda fan_in, fan_out: 2 / (fan_in + fan_out)),
    "HeNormal": (initializers.HeNormal, lambda fan_in, fan_out: 2 / fan_in),
    "LecunNormal": (initializers.LecunNormal, lambda fan_in, fan_out: 1 / fan_in),
}
KERAS = {
    "XavierUniform": keras.initializers.GlorotUniform,
    "XavierNormal": keras.initializers.GlorotNormal,
    "HeNormal": keras.initializers.HeNormal,
    "LecunNormal": keras.initializers.LecunNormal,
    "Orthogonal": keras.initializers.Orthogonal,
    "TruncatedNormal": lambda seed: keras.initializers.TruncatedNormal(stddev=0.3, seed=seed),
}
MAKE = {name: row[0] for name, row in SCALED.items()} | {
    "Orthogonal": initializers.Orthogonal,
    "TruncatedNormal": lambda seed=None: initializers.TruncatedNormal(0.3, seed=seed),
}
EVERY = pytest.mark.parametrize("name", MAKE)
PRECISIONS = pytest.mark.parametrize("dtype", ["float32", "float64"])


# ---------------------------------------------------------------- every initializer


@EVERY
@PRECISIONS
def test_an_initializer_is_kerass_own_in_a_layer(name, dtype):
    ours, theirs = MAKE[name](seed=5), KERAS[name](seed=5)
    assert np.array_equal(ours((40, 30), dtype=dtype), theirs((40, 30), dtype=dtype))


@EVERY
def test_an_initializer_survives_serialisation(name):
    initializer = MAKE[name](seed=5)
    described = json.loads(json.dumps(keras.saving.serialize_keras_object(initializer)))
    assert described["registered_name"].startswith("prunekit>")
    again = keras.saving.deserialize_keras_object(described)
    assert type(again) is type(initializer) and again.get_config() == initializer.get_config()
    assert np.array_equal(again((7, 3)), initializer((7, 3)))
    assert type(initializer.clone()) is type(initializer)


@EVERY
def test_a_model_with_it_is_saved_and_loaded(name, tmp_path):
    model = built(layers.Dense(3, kernel_initializer=MAKE[name](seed=5)), (7,))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0].kernel_initializer) is type(MAKE[name]())
    assert loaded.layers[0].kernel_initializer.get_config() == MAKE[name](seed=5).get_config()
    assert np.array_equal(loaded.layers[0].kernel, model.layers[0].kernel)


@EVERY
@PRECISIONS
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(name, dtype):
    draws = []
    for seed in (1, 1, 2):
        model = wide(dtype, (20, 10))
        report = initializers.reinitialize(model, MAKE[name](), seed=seed)
        assert report.seed == seed and [row.std_after > 0 for row in report.weights] == [True, True]
        assert all(value.dtype == dtype for value in kernels(model).values())
        draws.append(np.concatenate([value.ravel() for value in kernels(model).values()]))
    assert np.array_equal(draws[0], draws[1]) and not np.isclose(draws[0], draws[2]).any()


@EVERY
def test_what_a_weight_gets_does_not_depend_on_the_choice_of_weights(name):
    whole, part, masked = wide(units=(20, 10)), wide(units=(20, 10)), wide(units=(20, 10))
    initializers.reinitialize(whole, MAKE[name](), seed=1)
    former = part.layers[0].kernel.numpy()
    initializers.reinitialize(part, MAKE[name](), include=["dense_1"], seed=1)
    initializers.reinitialize(masked, MAKE[name](), masks={"dense_0/kernel": np.zeros((400, 20), bool)}, seed=1)
    assert np.array_equal(part.layers[0].kernel, former)
    assert np.array_equal(part.layers[1].kernel, whole.layers[1].kernel)
    assert np.array_equal(masked.layers[1].kernel, whole.layers[1].kernel)
    assert not masked.layers[0].kernel.numpy().any()


@EVERY
def test_two_weights_of_one_shape_get_different_numbers(name):
    model = keras.Sequential([keras.Input((9,)), layers.Dense(9), layers.Dense(9)])
    initializers.reinitialize(model, MAKE[name](seed=3))
    assert not np.isclose(model.layers[0].kernel, model.layers[1].kernel).any()


@EVERY
@PRECISIONS
@pytest.mark.parametrize("sparsity", [0.5, 0.9, 1.0])
def test_pruned_weights_are_exactly_zero_and_no_others(name, dtype, sparsity):
    model = wide(dtype, (50,))
    mask = np.random.default_rng(0).random((400, 50)) >= sparsity
    (row,) = initializers.reinitialize(model, MAKE[name](), masks={"dense_0/kernel": mask}, seed=1).weights
    kernel = model.layers[0].kernel.numpy()
    assert np.array_equal(kernel != 0, mask) and not np.signbit(kernel[~mask]).any()
    assert row.kept == mask.sum() and np.isclose(row.std_after, kernel[mask].std() if mask.any() else 0)


@pytest.mark.parametrize("name", [*MAKE, "LSUV"])
@pytest.mark.parametrize("policy", ["float16", "bfloat16", "mixed_float16"])
def test_half_precision_weights_are_finite_and_keep_their_type(name, policy):
    model = keras.Sequential([keras.Input((60,)), layers.Dense(40, dtype=policy)])
    x = np.random.default_rng(0).normal(size=(32, 60))
    chosen = initializers.LSUV(x) if name == "LSUV" else MAKE[name]()
    former = keras.backend.standardize_dtype(model.layers[0].kernel.dtype)
    (row,) = initializers.reinitialize(model, chosen, seed=1).weights
    assert keras.backend.standardize_dtype(model.layers[0].kernel.dtype) == former
    assert 0.05 < row.std_after < 0.5


# ---------------------------------------------------------------- distributions


@PRECISIONS
def test_truncated_normal_has_the_moments_that_scipy_gives(dtype):
    stats = pytest.importorskip("scipy.stats")
    values = np.asarray(initializers.TruncatedNormal(0.3, mean=-1.0, seed=4)((500, 600), dtype=dtype), np.float64)
    law = stats.truncnorm(-2, 2, loc=-1.0, scale=0.3)
    assert math.isclose(law.std() / 0.3, CUT_DEVIATION, rel_tol=1e-12)
    assert abs(values.mean() - law.mean()) < 5 * law.std() / math.sqrt(values.size)
    assert math.isclose(values.std(), law.std(), rel_tol=0.01)
    assert abs(values + 1).max() <= 0.6 and abs(values + 1).max() > 0.599
    assert stats.kstest(values.ravel()[:20000], law.cdf).pvalue > 1e-3


@PRECISIONS
@pytest.mark.parametrize("name", SCALED)
def test_scaled_initializers_have_the_asked_variance_and_law(name, dtype):
    stats = pytest.importorskip("scipy.stats")
    model = wide(dtype)
    initializers.reinitialize(model, SCALED[name][0](), seed=2)
    for kernel in kernels(model).values():
        deviation = math.sqrt(SCALED[name][1](*kernel.shape))
        law = stats.uniform(-math.sqrt(3), 2 * math.sqrt(3)) if "Uniform" in name else stats.truncnorm(-2, 2)
        standard = np.asarray(kernel, np.float64).ravel() / deviation * (1 if "Uniform" in name else law.std())
        assert math.isclose(kernel.std(), deviation, rel_tol=0.01)
        assert stats.kstest(standard[:20000], law.cdf).pvalue > 1e-3


@PRECISIONS
@pytest.mark.parametrize(("inputs", "units"), [(30, 20), (20, 30), (25, 25), (1, 8), (8, 1)])
def test_orthogonal_kernels_have_orthonormal_rows_or_columns(inputs, units, dtype):
    model = built(layers.Dense(units, dtype=dtype), (inputs,), dtype)
    initializers.reinitialize(model, initializers.Orthogonal(gain=3.0), seed=1)
    kernel = model.layers[0].kernel.numpy() / 3
    gram = kernel.T @ kernel if inputs >= units else kernel @ kernel.T
    assert np.allclose(gram, np.eye(min(inputs, units)), atol=1e-5 if dtype == "float32" else 1e-12)


def test_orthogonal_matrices_are_drawn_uniformly():
    # One sample of 3,000: the rows of an embedding are matrices of one row, the channels here of two by two.
    model = built(layers.DepthwiseConv2D((1, 2), depth_multiplier=2), (1, 2, 3000))
    initializers.reinitialize(model, initializers.Orthogonal(), seed=1)
    matrices = model.layers[0].kernel.numpy()[0].transpose(1, 0, 2)
    assert abs(matrices.mean(axis=0)).max() < 0.06  # of deviation 1 / sqrt(2 * 3000) = 0.013
    assert abs((np.linalg.det(matrices) > 0).mean() - 0.5) < 0.05


def test_orthogonal_convolutions_are_orthogonal_over_what_an_output_sums():
    model = built(layers.Conv2DTranspose(5, 3), (8, 8, 4))
    initializers.reinitialize(model, initializers.Orthogonal(), seed=1)
    rows = model.layers[0].kernel.numpy().transpose(0, 1, 3, 2).reshape(-1, 5)  # (h, w, inputs), outputs
    assert np.allclose(rows.T @ rows, np.eye(5), atol=1e-5)
    model = built(layers.DepthwiseConv2D(3, depth_multiplier=2), (8, 8, 4))
    initializers.reinitialize(model, initializers.Orthogonal(), seed=1)
    for channel in range(4):
        rows = model.layers[0].kernel.numpy()[:, :, channel].reshape(9, 2)
        assert np.allclose(rows.T @ rows, np.eye(2), atol=1e-5)


def test_a_mask_leaves_each_orthogonal_output_unit_its_norm():
    mask = np.random.default_rng(0).random((400, 50)) > 0.8
    mask[:, 0] = False
    model = wide(units=(50,))
    initializers.reinitialize(model, initializers.Orthogonal(gain=2.0), masks={"dense_0/kernel": mask}, seed=1)
    norms = np.linalg.norm(model.layers[0].kernel.numpy(), axis=0)
    assert norms[0] == 0 and np.allclose(norms[1:], 2, atol=1e-5)


# ---------------------------------------------------------------- fans

# Layer, input shape -> for each kernel: index -> (its input unit, its output unit).
CASES = {
    "dense": (lambda: layers.Dense(5), (4,), {"dense/kernel": lambda i, o: (i, o)}),
    "convolution": (lambda: layers.Conv2D(5, 3), (8, 8, 4), {"conv2d/kernel": lambda h, w, i, o: (i, o)}),
    "groups": (
        lambda: layers.Conv2D(6, 3, groups=2),
        (8, 8, 4),
        {"conv2d/kernel": lambda h, w, i, o: ((i, o // 3), o)},
    ),
    "transposed": (
        lambda: layers.Conv2DTranspose(5, 3),
        (8, 8, 4),
        {"conv2d_transpose/kernel": lambda h, w, o, i: (i, o)},
    ),
    "depthwise": (
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
        (8, 8, 4),
        {"depthwise_conv2d/kernel": lambda h, w, c, m: (c, (c, m))},
    ),
    "separable": (
        lambda: layers.SeparableConv1D(5, 3, depth_multiplier=2),
        (8, 4),
        {
            "separable_conv1d/depthwise_kernel": lambda w, c, m: (c, (c, m)),
            "separable_conv1d/pointwise_kernel": lambda w, i, o: (i, o),
        },
    ),
    "heads": (
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3)),
        (6, 4),
        {"einsum_dense/kernel": lambda i, h, k: (i, (h, k))},
    ),
    "batch label": (
        lambda: layers.EinsumDense("abc,bcd->abd", (6, 3)),
        (6, 4),
        {"einsum_dense/kernel": lambda b, i, o: ((b, i), (b, o))},
    ),
    "recurrent": (
        lambda: layers.GRU(3),
        (6, 4),
        {"gru/kernel": lambda i, o: (i, o), "gru/recurrent_kernel": lambda i, o: (i, o)},
    ),
    "embedding": (lambda: layers.Embedding(7, 3), (6,), {"embedding/embeddings": lambda t, o: (t, (t, o))}),
}


def counted(shape, units, mask):
    """Fans counted weight by weight."""
    pairs = {index: units(*index) for index in itertools.product(*map(range, shape))}
    into, out = np.zeros(shape, int), np.zeros(shape, int)
    for index, (source, unit) in pairs.items():
        into[index] = sum(mask[other] for other, (_, end) in pairs.items() if end == unit)
        out[index] = sum(mask[other] for other, (start, _) in pairs.items() if start == source)
    return into, out


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
@pytest.mark.parametrize("case", CASES)
def test_fans_are_those_counted_weight_by_weight(case, masked):
    make, shape, expected = CASES[case][0], CASES[case][1], dict(CASES[case][2])
    layer = make()
    layer.name = next(iter(expected)).split("/")[0]
    model = built(layer, shape)
    for target in find_targets(model, also=("depthwise_kernel",))[0]:
        mask = np.random.default_rng(1).random(target.shape) > (0.6 if masked else -1)
        found = fans(target, mask if masked else None)
        for ours, theirs in zip(found, counted(target.shape, expected.pop(target.name), mask), strict=True):
            assert np.array_equal(np.broadcast_to(ours, target.shape), theirs)
    assert not expected


def test_attention_kernels_have_the_fans_of_their_axes():
    x = keras.Input((5, 16))
    model = keras.Model(x, layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    rows = {row.name: row for row in initializers.reinitialize(model, initializers.LecunNormal(), seed=1).weights}
    assert {name: (row.fan_in, row.fan_out) for name, row in rows.items()} == {
        "attention/query/kernel": (16, 8),
        "attention/key/kernel": (16, 8),
        "attention/value/kernel": (16, 8),
        "attention/attention_output/kernel": (8, 16),
    }
    assert math.isclose(rows["attention/query/kernel"].std_after, 1 / 4, rel_tol=0.25)


@PRECISIONS
@pytest.mark.parametrize("name", SCALED)
def test_each_unit_under_a_mask_has_the_deviation_of_its_own_count(name, dtype):
    rng = np.random.default_rng(3)
    mask = rng.random((400, 300)) < np.linspace(0.02, 1, 300)  # output units of very different density
    model = wide(dtype, (300,))
    (row,) = initializers.reinitialize(model, SCALED[name][0](), masks={"dense_0/kernel": mask}, seed=1).weights
    kernel = np.asarray(model.layers[0].kernel.numpy(), np.float64)
    fan_in, fan_out = mask.sum(axis=0, keepdims=True), mask.sum(axis=1, keepdims=True)
    standard = kernel / np.sqrt(SCALED[name][1](np.maximum(fan_in, 1), fan_out))
    for half in (slice(0, 30), slice(30, 150), slice(150, 300)):
        assert math.isclose(standard[:, half][mask[:, half]].std(), 1, rel_tol=0.05)
    assert math.isclose(row.fan_in, fan_in.mean()) and math.isclose(row.fan_out, fan_out.mean())


def test_density_correction_keeps_the_spread_of_a_sparse_layer():
    x = np.random.default_rng(0).normal(size=(500, 400)).astype("float32")
    mask = np.random.default_rng(1).random((400, 300)) < 0.1
    spreads = []
    for masks in (None, {"dense_0/kernel": mask}):
        model = wide(units=(300,))
        initializers.reinitialize(model, initializers.LecunNormal(), masks=masks, seed=1)
        spreads.append((x @ (model.layers[0].kernel.numpy() * mask)).std())
    assert math.isclose(spreads[0], math.sqrt(0.1), rel_tol=0.05) and math.isclose(spreads[1], 1, rel_tol=0.05)


@EVERY
def test_attention_layers_take_it_as_their_initializer(name):
    # Keras makes a copy with the axes of each kernel.
    x = keras.Input((5, 16))
    model = keras.Model(x, layers.MultiHeadAttention(2, 4, kernel_initializer=MAKE[name](seed=1))(x, x))
    assert all(kernel.std() > 0 for kernel in kernels(model).values())


@pytest.mark.parametrize("stddev", [0.0, -1.0, math.inf, math.nan])
def test_truncated_normal_needs_a_positive_deviation(stddev):
    with pytest.raises(ValueError, match="finite number above 0. Received: stddev="):
        initializers.TruncatedNormal(stddev)
