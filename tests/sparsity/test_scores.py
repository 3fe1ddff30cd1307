"""Every criterion goes through the same battery; what only one of them promises comes after it."""

import dataclasses
import pickle

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from keras import ops

from prunekit.sparsity.automatic import AutomaticCriterion
from prunekit.sparsity.channel_scores import APoZ, BatchNormalizationScale, GeometricMedian, MeanActivation
from prunekit.sparsity.gradient_scores import SNIP, Fisher, GraSP, OptimalBrainDamage, SynFlow, Taylor
from prunekit.sparsity.scores import (
    L2,
    Criterion,
    Custom,
    Magnitude,
    Movement,
    Random,
    Wanda,
    get_criterion,
    sparsities_of_rounds,
)
from prunekit.sparsity.shorthands import CRITERIA
from prunekit.techniques.pruning.policies.sparsegpt import HessianCriterion, OutputError, SparseGPT

pytestmark = pytest.mark.every_backend


def smallest_first(weight):
    return -ops.abs(weight)


# JAX takes float64 for float32.
DOUBLE = "float32" if BACKEND == "jax" else "float64"
OF_UNITS = [BatchNormalizationScale(), APoZ(), MeanActivation()]
OF_GRADIENTS = [SNIP(), GraSP(), SynFlow(), Taylor(), Fisher(), OptimalBrainDamage()]
FAMILY = [
    *(Magnitude(), L2(), Movement(), Random(), Random(seed=2**40 + 3), Custom(smallest_first)),
    *(*OF_UNITS, *OF_GRADIENTS, GeometricMedian()),
    *(Wanda(), Wanda(per_output=False), OutputError(), SparseGPT(run=8)),
]
WEIGHTS = {
    "rank 1": np.array([0.5, -0.25, 0.0, -0.0, 3.0, -3.0, 1e-30], "float32"),
    "single": np.array([[-2.0]], "float32"),
    "ragged": np.random.default_rng(0).normal(size=(5, 7)).astype("float32"),
    "convolution": np.random.default_rng(1).normal(size=(3, 1, 2, 5)).astype("float32"),
    "rank 5": np.random.default_rng(2).normal(size=(2, 1, 3, 2, 2)).astype(DOUBLE),
    "half": np.array([[300.0, -1e-4, 6e-8], [1e-3, -65504.0, 0.0]], "float16"),
    "empty": np.zeros((0, 4), "float32"),
}


@pytest.fixture(params=FAMILY, ids=lambda one: "Custom" if isinstance(one, Custom) else repr(one))
def criterion(request) -> Criterion:
    return request.param


@pytest.fixture(params=WEIGHTS.values(), ids=WEIGHTS)
def weight(request) -> np.ndarray:
    return request.param


def statistics_for(criterion, weight):
    """A statistic for each that the criterion needs: minus the weight, or numbers of the units on its last axis."""
    if isinstance(criterion, Wanda | HessianCriterion):
        value = ops.abs(ops.cast(weight, "float32"))
        return {"input_norm": value, "hessian": {"curvature": value}}
    of_units = criterion in OF_UNITS
    value = ops.arange(weight.shape[-1], dtype="float32") if of_units else -ops.convert_to_tensor(weight)
    return {name: value for name in criterion.needs} or None


def scores(criterion, weight, **arguments) -> np.ndarray:
    weight = ops.convert_to_tensor(weight)
    return ops.convert_to_numpy(criterion(weight, statistics=statistics_for(criterion, weight), **arguments))


@pytest.mark.one_backend
def test_every_criterion_of_the_module_is_in_the_family_and_the_table():
    # Other tests define criteria of their own.
    known = {kind for kind in Criterion.__subclasses__() if kind.__module__.startswith("prunekit.")}
    known = known - {HessianCriterion, AutomaticCriterion} | {OutputError, SparseGPT}
    assert {type(criterion) for criterion in FAMILY} == known
    assert {row.load() for row in CRITERIA.values()} == known - {Custom} | {AutomaticCriterion}


@pytest.mark.one_backend
def test_the_stand_in_for_a_criterion_that_is_chosen_later_gives_no_scores():
    with pytest.raises(TypeError, match='The criterion "auto" is chosen by pk.prune, Pruner and PruningCallback'):
        get_criterion("auto")(np.ones(3))


def test_an_importance_has_the_shape_of_the_weight_and_is_finite_floating_point(criterion, weight):
    importance = scores(criterion, weight)
    assert importance.shape == weight.shape
    assert importance.dtype in (np.float32, weight.dtype)
    assert np.isfinite(importance).all()


@tensorflow_only
def test_an_importance_is_the_same_eagerly_in_a_graph_and_under_xla(criterion, weight):
    import tensorflow as tf

    eager = scores(criterion, weight, seed_offset=3)
    for jit_compile in (False, True):
        compiled = tf.function(
            lambda w: criterion(w, seed_offset=3, statistics=statistics_for(criterion, w)), jit_compile=jit_compile
        )
        # Sums are added in another order under XLA.
        tolerance = 1e-5 if isinstance(criterion, GeometricMedian) else 0
        np.testing.assert_allclose(compiled(tf.constant(weight)).numpy(), eager, rtol=tolerance)


def test_a_criterion_takes_a_keras_variable(criterion):
    variable = keras.Variable(WEIGHTS["ragged"])
    found = criterion(variable, statistics=statistics_for(criterion, variable))
    np.testing.assert_array_equal(ops.convert_to_numpy(found), scores(criterion, WEIGHTS["ragged"]))


@pytest.mark.one_backend
def test_a_criterion_is_frozen_hashable_comparable_and_picklable(criterion):
    needs = {row.load(): frozenset(row.needs) for row in CRITERIA.values()}
    assert criterion.needs == needs.get(type(criterion), frozenset())
    assert criterion == dataclasses.replace(criterion) == pickle.loads(pickle.dumps(criterion))
    assert hash(criterion) == hash(dataclasses.replace(criterion))
    with pytest.raises(dataclasses.FrozenInstanceError):
        criterion.seed = 3


@pytest.mark.one_backend
def test_the_abstract_criterion_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Criterion()


# One by one ----------------------------------------------------------------------------------------------------------


def test_magnitude_is_the_absolute_value_in_the_weights_own_type(weight):
    importance = scores(Magnitude(), weight)
    np.testing.assert_array_equal(importance, np.abs(weight))
    assert importance.dtype == weight.dtype
    assert not np.signbit(importance).any()


def test_l2_squares_in_at_least_32_bits(weight):
    wide = weight.astype("float64" if weight.dtype == np.float64 else "float32")
    np.testing.assert_array_equal(scores(L2(), weight), wide**2)


def test_magnitude_and_l2_show_nan_rather_than_hide_it():
    weight = np.array([1.0, np.nan, -np.inf], "float32")
    for criterion in (Magnitude(), L2()):
        np.testing.assert_array_equal(np.isnan(scores(criterion, weight)), [False, True, False])


def hashed(seed: int, offset: int, size: int) -> list[float]:
    """The scores of `Random`, one position at a time, in Python's unbounded integers."""

    def mixed(x):
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    first, second = (int(key) for key in np.random.SeedSequence((seed, offset)).generate_state(2))
    return [(mixed(mixed((i + first) % 2**32) ^ second) >> 8) / 2**24 for i in range(size)]


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (0, 1), (1, 0), (2**40, 7)])
def test_random_scores_are_the_hash_of_the_position(seed, offset):
    np.testing.assert_array_equal(scores(Random(seed), np.zeros((41,)), seed_offset=offset), hashed(seed, offset, 41))


def test_random_scores_repeat_whatever_the_weight_and_differ_by_seed_and_offset():
    zeros, ones = np.zeros((9, 11), "float32"), np.ones((9, 11), "float16")
    np.testing.assert_array_equal(scores(Random(1), zeros), scores(Random(1), ones))
    drawn = [scores(Random(seed), zeros, seed_offset=offset) for seed in range(4) for offset in range(4)]
    assert len({draw.tobytes() for draw in drawn}) == 16


def test_random_scores_are_uniform_and_independent_of_one_another():
    size = 200_000
    drawn = np.stack(
        [scores(Random(seed), np.zeros(size), seed_offset=offset) for seed in (0, 1) for offset in (0, 1)]
    ).astype("float64")
    assert drawn.min() >= 0.0 and drawn.max() < 1.0
    for draw in drawn:
        counts = np.histogram(draw, bins=64, range=(0, 1))[0]
        # Chi-squared with 63 degrees of freedom exceeds 130 once in a million draws; the seeds are fixed.
        assert ((counts - size / 64) ** 2 / (size / 64)).sum() < 130
        assert abs(np.corrcoef(draw[1:], draw[:-1])[0, 1]) < 0.01
        assert np.unique(draw).size > 0.99 * size
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.01


@pytest.mark.parametrize("seed", [True, 1.0, "1", None])
@pytest.mark.one_backend
def test_a_seed_that_is_no_int_is_refused(seed):
    with pytest.raises(TypeError, match="seed must be an int. Received: seed="):
        Random(seed)


@pytest.mark.one_backend
def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed must be at least 0. Received: seed=-1"):
        Random(-1)


def test_a_custom_function_is_called_with_the_weight():
    np.testing.assert_array_equal(scores(Custom(smallest_first), np.array([1.0, -2.0])), [-1.0, -2.0])


def test_a_custom_function_is_given_the_keywords_that_it_names():
    def flow(weight, *, statistics, target=None):
        return weight * statistics["gradient"] + target

    flow.needs = ["gradient"]
    criterion = get_criterion(flow)
    assert criterion.needs == {"gradient"}
    found = criterion(ops.ones((2,)), statistics={"gradient": ops.convert_to_tensor([2.0, 3.0])}, target=1.0)
    np.testing.assert_array_equal(ops.convert_to_numpy(found), [3.0, 4.0])
    # A weight alone is passed to functions of one parameter, whatever its name.
    np.testing.assert_array_equal(scores(Custom(lambda target: -target), np.array([1.0])), [-1.0])
    np.testing.assert_array_equal(scores(Custom(ops.abs), np.array([-1.0])), [1.0])


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("needs", "message"), [("gradient", "collection of names"), (["gradient"], "takes them as the parameter")]
)
def test_a_custom_function_that_cannot_be_given_its_statistics_is_refused(needs, message):
    def score(weight):
        return weight

    score.needs = needs
    with pytest.raises(TypeError, match=message):
        Custom(score)


@dataclasses.dataclass
class Axes:
    """The axes of a target."""

    out_axes: tuple
    name: str = "layer/kernel"


@pytest.mark.every_backend(cases=0)
def test_the_geometric_median_is_the_sum_of_distances_to_the_other_units():
    kernel = np.random.default_rng(4).normal(size=(3, 2, 4, 5)).astype("float32")
    kernel[..., 1, :] = kernel[..., 2, :]
    for out in ((3,), (2,), (2, 3)):
        units = np.moveaxis(kernel, out, range(len(out))).reshape(np.prod([kernel.shape[a] for a in out]), -1)
        sums = [sum(np.sqrt(((unit - other) ** 2).sum()) for other in units) for unit in units]
        expected = np.reshape(sums, [kernel.shape[a] if a in out else 1 for a in range(4)])
        found = scores(GeometricMedian(), kernel, target=Axes(out))
        np.testing.assert_allclose(found, np.broadcast_to(expected, kernel.shape), rtol=1e-5)


@pytest.mark.one_backend
def test_the_geometric_median_of_many_units_is_computed_in_blocks():
    kernel = np.random.default_rng(6).normal(size=(3, 530)).astype("float32")
    expected = np.sqrt(((kernel[:, :, None].astype("float64") - kernel[:, None, :]) ** 2).sum(axis=0)).sum(axis=1)
    np.testing.assert_allclose(scores(GeometricMedian(), kernel)[0], expected, rtol=1e-4)


@pytest.mark.one_backend
def test_the_geometric_median_shows_nan_rather_than_hide_it():
    assert np.isnan(scores(GeometricMedian(), np.array([[1.0, np.nan], [2.0, 3.0]], "float32"))).all()


@pytest.mark.parametrize(
    ("criterion", "formula"),
    [
        (SNIP(), lambda w, s: np.abs(w * s)),
        (GraSP(), lambda w, s: w * s),
        (SynFlow(), lambda w, s: np.abs(w) * s),
        (Taylor(), lambda w, s: w**2 * s),
        (Fisher(), lambda w, s: w**2 * s / 2),
        (OptimalBrainDamage(), lambda w, s: w**2 * s / 2),
    ],
    ids=lambda one: repr(one) if isinstance(one, Criterion) else "",
)
def test_a_criterion_of_derivatives_is_its_formula(criterion, formula):
    rng = np.random.default_rng(9)
    weight, statistic = rng.normal(size=(4, 5)).astype("float32"), rng.normal(size=(4, 5)).astype("float32")
    if not isinstance(criterion, GraSP):
        statistic = np.abs(statistic)  # SynFlow's and all squares are not negative
    (name,) = criterion.needs
    found = criterion(ops.convert_to_tensor(weight), statistics={name: ops.convert_to_tensor(statistic)})
    np.testing.assert_allclose(ops.convert_to_numpy(found), formula(weight, statistic), rtol=1e-6)


@pytest.mark.parametrize("criterion", OF_UNITS, ids=repr)
def test_numbers_of_units_are_repeated_along_the_other_axes(criterion):
    (name,) = criterion.needs
    values = np.array([-1.0, 2.0, 3.0], "float32")
    found = criterion(np.zeros((2, 3, 4), "float32"), target=Axes((1,)), statistics={name: values})
    expected = {BatchNormalizationScale: np.abs(values), APoZ: -values, MeanActivation: values}[type(criterion)]
    np.testing.assert_array_equal(ops.convert_to_numpy(found), np.broadcast_to(expected[:, None], (2, 3, 4)))


def test_a_weight_without_output_units_is_refused_by_criteria_that_rank_them():
    with pytest.raises(ValueError, match="Received: layer/kernel, of shape .* no axis of output units"):
        GeometricMedian()(ops.ones((3,)), target=Axes(()))


@pytest.mark.one_backend
def test_rounds_divide_the_density_by_the_same_factor():
    found = sparsities_of_rounds(0.2, 0.95, 4)
    densities = 1 - np.array([0.2, *found])
    np.testing.assert_allclose(densities[1:] / densities[:-1], (0.05 / 0.8) ** 0.25)
    assert found[-1] == 0.95 and sparsities_of_rounds(0.5, 0.5, 3) == [0.5]
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        SynFlow(rounds=0)


def test_a_custom_function_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"so shape \(2, 3\). Received: shape \(2,\) from row_sums"):

        def row_sums(weight):
            return ops.sum(weight, axis=1)

        Custom(row_sums)(ops.ones((2, 3)))


@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_a_custom_function_that_returns_no_floats_is_refused_with_the_remedy(dtype):
    with pytest.raises(TypeError, match=f"Received: {dtype} from .*keras.ops.cast"):
        Custom(lambda weight: ops.cast(weight > 0, dtype))(ops.ones((2, 3)))


@pytest.mark.parametrize("function", [None, 3, "magnitude", Magnitude], ids=repr)
@pytest.mark.one_backend
def test_a_custom_criterion_of_something_else_than_a_function_is_refused(function):
    with pytest.raises(TypeError, match="criterion function must take a weight .* Received: "):
        Custom(function)


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"), [("magnitude", Magnitude()), ("l1", Magnitude()), ("l2", L2()), ("random", Random(0))]
)
@pytest.mark.one_backend
def test_a_name_gives_its_criterion(name, expected):
    assert get_criterion(name) == expected


@pytest.mark.one_backend
def test_a_criterion_stays_what_it_is_and_a_function_becomes_custom(criterion):
    assert get_criterion(criterion) is criterion
    assert get_criterion(smallest_first) == Custom(smallest_first)


@pytest.mark.parametrize("name", ["", "weight", "Magnitude", "magnitud", "wander"])
@pytest.mark.one_backend
def test_an_unknown_name_is_refused_with_the_valid_ones(name):
    with pytest.raises(ValueError, match=f"Received: '{name}'. Valid are: auto, magnitude, l1, l2, movement, random"):
        get_criterion(name)


@pytest.mark.one_backend
def test_a_near_miss_is_named():
    with pytest.raises(ValueError, match="Did you mean 'magnitude'"):
        get_criterion("Magnitud")


@pytest.mark.one_backend
def test_a_class_instead_of_a_criterion_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"not its class. Received: Magnitude. Pass Magnitude\(\)"):
        get_criterion(Magnitude)


@pytest.mark.parametrize("criterion", [None, 3, 0.5, int, ["magnitude"]], ids=repr)
@pytest.mark.one_backend
def test_something_that_is_no_criterion_is_refused(criterion):
    with pytest.raises(TypeError, match="A criterion is one of auto, magnitude.* Received: "):
        get_criterion(criterion)
