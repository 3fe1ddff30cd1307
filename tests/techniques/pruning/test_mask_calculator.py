"""Masks are equal to the bit whether they are calculated by compiled functions, by single operations or by NumPy."""

import weakref

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from keras import ops

from prunekit.anatomy.layers.targets import find_targets
from prunekit.operations.prune import prune
from prunekit.sparsity.allocation import Global
from prunekit.sparsity.patterns import Channel
from prunekit.techniques.pruning.masks.mask_calculator import MaskCalculator
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.held_masks import nonzero_within

pytestmark = pytest.mark.every_backend

# JAX takes float64 for float32.
DTYPES = ["float32", "float16", "bfloat16"] + (["float64"] if BACKEND != "jax" else [])
WEIGHTS = {
    "ties": lambda normal, random: np.round(normal * 2) / 2,
    "zero": lambda normal, random: np.zeros(normal.shape),
    "signed_zeros": lambda normal, random: np.where(random < 0.6, np.copysign(0.0, normal), normal),
    "infinite": lambda normal, random: np.where(random < 0.2, np.copysign(np.inf, normal), normal),
    "wide": lambda normal, random: normal * 10.0 ** np.floor(8 * random - 4),
    "nan": lambda normal, random: np.where(random < 0.05, np.nan, normal),
}
OPTIONS = [
    *({"pattern": "unstructured", "allocation": allocation} for allocation in ("uniform", "erk", "global")),
    *({"pattern": "block:4x1", "allocation": allocation} for allocation in ("uniform", "erk", "global")),
    *({"pattern": "channel", "allocation": allocation} for allocation in ("uniform", "global")),
    {"pattern": "block:3x2:max"},
    {"pattern": "block:5x3", "allocation": "global", "keep_one": False},
    {"pattern": "2:4"},
    {"pattern": "3:24"},
    {"criterion": "l2", "pattern": "block:2x2"},
    {"criterion": "random"},
    {"criterion": "movement", "allocation": "global"},
]
# The other backends compile for longer, or not at all.
CASES = [(chosen, "float32") for chosen in (OPTIONS if BACKEND == "tensorflow" else OPTIONS[::3])]
if BACKEND == "tensorflow":
    CASES += [(chosen, dtype) for chosen in (*OPTIONS[0:8:3], OPTIONS[10]) for dtype in DTYPES[1:]]


def model_of(kinds, dtype):
    """A Dense and a convolution for each kind of weights, and one of a single channel."""
    generator = np.random.default_rng(1)
    flat, image = keras.Input((24,)), keras.Input((5, 5, 24))
    outputs = []
    for kind in kinds:
        for name, layer, x in (
            ("dense", keras.layers.Dense(10), flat),
            ("single", keras.layers.Dense(1), flat),
            ("conv", keras.layers.Conv2D(6, 2), image),
        ):
            layer = type(layer).from_config({**layer.get_config(), "name": f"{name}_{kind}", "dtype": dtype})
            outputs.append(layer(x))
            shape = tuple(layer.kernel.shape)
            drawn = WEIGHTS[kind](generator.normal(size=shape), generator.random(shape))
            layer.kernel.assign(ops.cast(drawn, dtype))
    return keras.Model([flat, image], outputs)


class Compiled(MaskCalculator):
    """Compiles every group of targets."""

    _is_compiled = True


class Operations(MaskCalculator):
    """Runs single operations of the backend."""

    _is_compiled = False

    def _small(self, weights):
        return [False] * len(weights)


class Arrays(Operations):
    """Calculates every mask in NumPy."""

    def _small(self, weights):
        return [True] * len(weights)


def movements(targets):
    generator = np.random.default_rng(3)
    return [{"movement": ops.convert_to_tensor(generator.normal(size=t.shape).astype("float32"))} for t in targets]


def updates(calculator):
    """Two updates, in which some entries were pruned before, as (masks, NaN, leaks, kept)."""
    generator = np.random.default_rng(7)
    masks = [np.ones(target.shape, bool) for target in calculator.targets]
    for share in (0.3, 0.5 if str(calculator.pattern) == "2:4" else 0.8):
        masks = [mask & (generator.random(mask.shape) > 0.1) for mask in masks]
        statistics = movements(calculator.targets) if calculator.criterion.needs else None
        update = calculator.choose(share, [ops.convert_to_tensor(mask) for mask in masks], statistics)
        masks = [np.array(ops.convert_to_numpy(mask)) for mask in update.masks]
        yield masks, update.nans.tolist(), update.leaks.tolist(), update.kept.tolist()


def named(**options):
    return PruningOptions(**{"criterion": "magnitude", "allocation": "uniform", **options})


def calculators(model, options):
    targets, _ = find_targets(model, (), (), training=False)
    final = {"2:4": 0.5, "3:24": 0.875}.get(str(options.pattern), 0.8)
    if options.pattern == Channel():
        # A sparsity of 0.8 would remove the only channel.
        targets = [target for target in targets if not target.name.startswith("single")]
    for kind in (Compiled, Operations, Arrays):
        calculator = kind(targets, options, final)
        calculator.pattern = options.pattern
        yield calculator


@pytest.mark.short(cases=6)
@pytest.mark.parametrize(("chosen", "dtype"), CASES, ids=str)
@pytest.mark.every_backend(cases=0)
def test_masks_are_the_same_however_they_are_calculated(chosen, dtype):
    model = model_of([kind for kind in WEIGHTS if kind != "nan"], dtype)
    ways = [list(updates(calculator)) for calculator in calculators(model, named(**chosen))]
    for compiled, *others in zip(*ways, strict=True):
        assert not any(compiled[1]) and any(compiled[2])
        for other in others:
            assert other[1:] == compiled[1:]
            for expected, found in zip(compiled[0], other[0], strict=True):
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "block:3x2", "block:3x2:max", "channel"])
def test_units_with_nan_are_counted_alike_however_masks_are_calculated(pattern, dtype):
    model = model_of(["wide", "nan"], dtype)
    ways = [next(updates(one))[1:3] for one in calculators(model, named(pattern=pattern))]
    assert any(ways[0][0])
    assert ways[1] == ways[0] and ways[2] == ways[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_are_adopted_and_nan_is_not(dtype):
    weight = ops.cast(np.array([[0.0, -0.0, 1.0], [np.nan, np.inf, -2.0]]), dtype)
    mask, kept = nonzero_within(ops.convert_to_tensor(np.array([[True, True, True], [True, True, False]])), weight)
    assert kept == 3
    np.testing.assert_array_equal(ops.convert_to_numpy(mask), [[False, False, True], [True, True, False]])
    whole, kept = nonzero_within(ops.ones((2, 3), "bool"), ops.ones((2, 3), dtype))
    assert kept == 6 and np.all(ops.convert_to_numpy(whole))


def test_importances_of_one_weight_are_held_at_a_time():
    alive, most = [], []

    class Watching(Operations):
        def _importance(self, *arguments):
            importance = super()._importance(*arguments)
            alive.append(weakref.ref(importance))
            most.append(sum(reference() is not None for reference in alive))
            return importance

    targets, _ = find_targets(model_of(["wide", "ties"], "float32"), (), (), training=False)
    calculator = Watching(targets, PruningOptions("magnitude", allocation="uniform"), 0.8)
    calculator.choose(0.8, [ops.ones(target.shape, "bool") for target in targets])
    # The former importance is released after the next one exists.
    assert len(most) == len(targets) and max(most) <= 2


@tensorflow_only
@pytest.mark.parametrize(
    "options", [{}, {"pattern": "2:4"}, {"pattern": "block:4x1"}, {"allocation": "global"}], ids=str
)
def test_one_shot_pruning_traces_nothing(perceptron, options, monkeypatch):
    import tensorflow as tf

    def refuse(*args, **kwargs):
        raise AssertionError("a function is traced")

    monkeypatch.setattr(type(tf.function(len)), "_initialize", refuse)
    with pytest.raises(AssertionError, match="is traced"):
        tf.function(lambda x: x)(tf.zeros(()))
    report = prune(perceptron, 0.5, repair="none", **options)
    assert sum(row.zeros for row in report.weights if row.role == "kernel") == 96


@pytest.mark.every_backend
@pytest.mark.parametrize("normalization", ["mean", "l2"])
def test_global_compares_normalized_importances(normalization):
    rng = np.random.default_rng(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, name="a"), keras.layers.Dense(4, name="b")])
    weights = [rng.normal(size=(6, 8)) * 50, rng.normal(size=(8, 4))]
    for layer, weight in zip(model.layers, weights, strict=True):
        layer.kernel.assign(weight)
    norms = [np.abs(weight).mean() if normalization == "mean" else np.linalg.norm(weight) for weight in weights]
    scores = [np.abs(weight) / norm for weight, norm in zip(weights, norms, strict=True)]
    threshold = np.sort(np.concatenate([score.ravel() for score in scores]))[39]
    prune(model, 0.5, criterion="magnitude", allocation=Global(normalization))
    for layer, score in zip(model.layers, scores, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(layer.kernel) != 0, score > threshold)
