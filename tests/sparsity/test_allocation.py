"""Every allocation goes through the same battery; ERK's formula and its clamping come after it."""

import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest

from prunekit.sparsity.allocation import ERK, LAMP, Allocation, Global, Uniform, WeightGeometry, get_allocation
from prunekit.sparsity.lamp import entries_kept
from prunekit.sparsity.selection import pruned_count
from prunekit.sparsity.shorthands import ALLOCATIONS

# Each model: (shape, input axes, output axes) per weight.
DENSE = [((784, 300), (0,), (1,)), ((300, 100), (0,), (1,)), ((100, 10), (0,), (1,))]
CONVOLUTION = [
    ((3, 3, 3, 16), (2,), (3,)),
    ((3, 3, 16, 16), (2,), (3,)),
    ((1, 1, 16, 32), (2,), (3,)),
    ((3, 3, 32, 64), (2,), (3,)),
    ((64, 10), (0,), (1,)),
]
MODELS = {
    "dense": DENSE,
    "convolution": CONVOLUTION,
    "tiny beside large": [((2, 2), (0,), (1,)), ((1, 1), (0,), (1,)), ((400, 400), (0,), (1,))],
    "twins": [((7, 5), (0,), (1,))] * 4,
    "one": [((6, 7), (0,), (1,))],
    "ranks 1 to 5": [
        ((9,), (), ()),
        ((5, 3), (0,), (1,)),
        ((3, 4, 6), (1,), (2,)),
        ((8, 2, 4), (0,), (1, 2)),
        ((3, 3, 2, 2, 4), (3,), (4,)),
        ((3, 3, 5, 2), (3,), (2,)),
    ],
    "none": [],
}
SPARSITIES = [0.0, 1e-4, 0.1, 1 / 3, 0.5, 0.75, 0.8, 0.9]
NOT_JOINT = [Uniform(), ERK(), LAMP()]
FAMILY = [*NOT_JOINT, Global()]


def allot(allocation: Allocation, sparsity: float, model) -> list[float]:
    rng = np.random.default_rng(0)
    scores = [np.abs(rng.normal(size=shape) * (i + 1)).astype("float32") for i, (shape, *_) in enumerate(model)]
    return allocation.sparsities(sparsity, [WeightGeometry(*weight) for weight in model], scores)


def sizes(model) -> list[int]:
    return [math.prod(shape) for shape, _, _ in model]


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def model(request):
    return request.param


def test_every_allocation_of_the_module_is_in_the_family_and_the_table():
    # Other tests define allocations of their own.
    known = {kind for kind in Allocation.__subclasses__() if kind.__module__ == "prunekit.sparsity.allocation"}
    assert {type(allocation) for allocation in FAMILY} == known
    assert known <= {row.load() for row in ALLOCATIONS.values()}


@pytest.mark.parametrize("allocation", NOT_JOINT, ids=repr)
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_every_weight_gets_a_sparsity_and_the_overall_one_is_met(allocation, sparsity, model):
    result = allot(allocation, sparsity, model)
    assert len(result) == len(model)
    assert all(type(value) is float and 0.0 <= value < 1.0 for value in result)
    pruned = sum(pruned_count(value, n) for value, n in zip(result, sizes(model), strict=True))
    if isinstance(allocation, ERK | LAMP):
        assert pruned == pruned_count(sparsity, sum(sizes(model)))
    else:
        assert abs(pruned - sparsity * sum(sizes(model))) <= 0.5 * len(model)


@pytest.mark.parametrize("allocation", NOT_JOINT, ids=repr)
def test_no_weight_gets_anything_back_when_the_sparsity_rises(allocation, model):
    before = [0] * len(model)
    # Each step of an allocation that reads importances sorts them.
    steps = 50 if allocation.needs_scores else 500
    for step in range(steps):
        result = allot(allocation, 0.9 * step / steps, model)
        pruned = [pruned_count(value, n) for value, n in zip(result, sizes(model), strict=True)]
        assert all(later >= earlier for later, earlier in zip(pruned, before, strict=True))
        before = pruned


@pytest.mark.parametrize("allocation", NOT_JOINT, ids=repr)
@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 80.0, float("nan"), float("inf")])
def test_a_sparsity_outside_zero_to_one_is_refused(allocation, sparsity):
    with pytest.raises(ValueError, match=r"fraction removed, in \[0, 1\). Received: sparsity="):
        allot(allocation, sparsity, DENSE)


@pytest.mark.parametrize("allocation", NOT_JOINT, ids=repr)
def test_empty_weights_are_refused(allocation):
    with pytest.raises(ValueError, match=r"without entries .* Received: shape \(0, 4\)"):
        allocation.sparsities(0.5, [WeightGeometry((0, 4), (0,), (1,))])


@pytest.mark.parametrize("allocation", FAMILY, ids=repr)
def test_an_allocation_is_frozen_hashable_comparable_picklable_and_has_a_source(allocation):
    assert allocation == dataclasses.replace(allocation) == pickle.loads(pickle.dumps(allocation))
    assert len({allocation, type(allocation)()}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        allocation.joint = True
    assert "Source:" in allocation.__doc__


def test_allocations_of_different_types_are_not_equal():
    assert len(set(FAMILY)) == len(FAMILY)


# One by one ----------------------------------------------------------------------------------------------------------


def test_uniform_gives_every_weight_the_same():
    assert allot(Uniform(), 0.7, DENSE) == [0.7, 0.7, 0.7]


def test_only_the_global_allocation_is_joint_and_it_has_no_sparsity_per_weight():
    assert [allocation.joint for allocation in FAMILY] == [False, False, False, True]
    with pytest.raises(ValueError, match="importances of all weights at once. Received: sparsity=0.5 for 3 weights"):
        allot(Global(), 0.5, DENSE)


def erk_densities(sparsity: float, model) -> list[Fraction]:
    """min(1, e * sum / product) with exact fractions; the weights at 1 are found by trying every set of them."""
    products = [math.prod(shape) for shape, _, _ in model]
    sums = []
    for shape, in_axes, out_axes in model:
        window = sum(length for axis, length in enumerate(shape) if axis not in (*in_axes, *out_axes))
        sums.append(window + sum(math.prod(shape[axis] for axis in axes) for axes in (in_axes, out_axes) if axes))
    budget = sum(products) - pruned_count(sparsity, sum(products))
    for choice in range(2 ** len(model)):
        full = [bool(choice >> i & 1) for i in range(len(model))]
        left = budget - sum(n for n, at_one in zip(products, full, strict=True) if at_one)
        shared = sum(s for s, at_one in zip(sums, full, strict=True) if not at_one)
        if all(full):
            return [Fraction(1)] * len(model)
        e = Fraction(left, shared)
        raw = [e * s / n for s, n in zip(sums, products, strict=True)]
        if e >= 0 and all(
            (density >= 1) if at_one else (density <= 1) for density, at_one in zip(raw, full, strict=True)
        ):
            return [min(density, Fraction(1)) for density in raw]
    raise AssertionError("no set of full weights meets the budget")


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.25, 0.5, 0.8, 0.9])
def test_erk_is_the_formula_up_to_whole_counts(sparsity, model):
    if not model:
        return
    result, expected = allot(ERK(), sparsity, model), erk_densities(sparsity, model)
    for value, density, n in zip(result, expected, sizes(model), strict=True):
        # Off by one where rounded counts, or the one entry that every weight keeps, had to be made up for.
        assert abs((1 - value) * n - density * n) <= 1.0 + 1e-6


def test_erk_density_is_proportional_to_sum_over_product_where_nothing_is_clamped():
    shapes = [shape for shape, _, _ in CONVOLUTION]
    density = 1 - np.array(allot(ERK(), 0.95, CONVOLUTION))
    raw = np.array([sum(shape) / math.prod(shape) for shape in shapes])
    rounding = 1 / np.array(sizes(CONVOLUTION)) / raw
    ratio = density / raw
    assert np.all(np.abs(ratio - np.median(ratio)) <= 2 * rounding + 1e-9)
    assert np.all(density < 1)


def test_erk_clamps_small_weights_at_one_and_lets_the_others_make_up_for_it():
    small, single, large = allot(ERK(), 0.5, MODELS["tiny beside large"])
    assert (small, single) == (0.0, 0.0)
    assert pruned_count(large, 160_000) == pruned_count(0.5, 160_005)


def test_erk_treats_equal_weights_equally_up_to_one_count():
    result = allot(ERK(), 0.9, MODELS["twins"])
    counts = [pruned_count(value, 35) for value in result]
    assert sum(counts) == 126
    assert sorted(counts, reverse=False) == [31, 31, 32, 32]


def test_erk_flattens_the_axes_of_an_attention_kernel():
    flat, heads = ((64, 32), (0,), (1,)), ((64, 4, 8), (0,), (1, 2))
    other = ((200, 200), (0,), (1,))
    assert allot(ERK(), 0.8, [flat, other]) == allot(ERK(), 0.8, [heads, other])
    assert allot(ERK(), 0.8, [((64, 4, 8), (-3,), (-2, -1)), other]) == allot(ERK(), 0.8, [heads, other])


def test_erk_keeps_one_entry_of_every_weight():
    model = [((10, 10), (0,), (1,))] * 3
    assert [pruned_count(value, 100) for value in allot(ERK(), 0.99, model)] == [99, 99, 99]
    assert [pruned_count(value, 100) for value in allot(ERK(), 0.995, model)] == [99, 99, 99]


def test_erk_is_quick_on_a_model_of_many_weights():
    rng = np.random.default_rng(0)
    model = [((int(a), int(b)), (0,), (1,)) for a, b in rng.integers(1, 700, size=(300, 2))]
    for sparsity in (0.3, 0.9, 0.999):
        result = allot(ERK(), sparsity, model)
        pruned = sum(pruned_count(value, n) for value, n in zip(result, sizes(model), strict=True))
        assert pruned == pruned_count(sparsity, sum(sizes(model)))


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expected"), [("uniform", Uniform()), ("global", Global()), ("erk", ERK())])
def test_a_name_gives_its_allocation_and_an_allocation_is_unchanged(name, expected):
    assert get_allocation(name) == expected
    assert get_allocation(expected) is expected


@pytest.mark.parametrize("name", ["", "ERK", "lamps"])
def test_an_unknown_name_is_refused_with_the_valid_ones(name):
    with pytest.raises(ValueError, match=f"Received: '{name}'. Valid are: auto, uniform, global, erk"):
        get_allocation(name)


@pytest.mark.parametrize("allocation", [None, 0.5, ERK, ["erk"]], ids=repr)
def test_something_that_is_no_allocation_is_refused(allocation):
    with pytest.raises(TypeError, match="An allocation is one of auto, uniform, global, erk.* Received: "):
        get_allocation(allocation)


def test_lamp_removes_the_least_scores_of_the_paper_over_all_weights():
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=(8, 5)) * 4, rng.normal(size=(6, 6)), rng.normal(size=(3, 2)) * 0.1]
    scores = []
    for weight in weights:
        flat = np.square(weight.ravel())
        scores.append(np.array([value / flat[flat >= value].sum() for value in flat]))
    removed = np.sort(np.concatenate(scores))[: round(0.6 * 82)]
    expected = [np.isin(score, removed).mean() for score in scores]
    layouts = [WeightGeometry(weight.shape, (0,), (1,)) for weight in weights]
    assert LAMP().sparsities(0.6, layouts, [np.abs(weight) for weight in weights]) == pytest.approx(expected)
    # The scale of a weight does not matter.
    assert LAMP().sparsities(0.6, layouts, [100 * np.abs(weights[0]), *map(np.abs, weights[1:])]) == pytest.approx(
        expected
    )


AWKWARD = {
    "normal": lambda random, n: np.abs(random.normal(size=n)),
    "few values": lambda random, n: random.integers(0, 4, n) / 3,
    "mostly zeros": lambda random, n: np.abs(random.normal(size=n)) * (random.random(n) < 0.1),
    "zeros": lambda random, n: np.zeros(n),
    "equal": lambda random, n: np.full(n, 0.37),
    "many magnitudes": lambda random, n: 10.0 ** random.uniform(-30, 30, n),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", AWKWARD)
def test_lamp_counts_what_sorting_all_scores_counts(kind, dtype):
    random = np.random.default_rng(5)
    weights = [AWKWARD[kind](random, n).astype(dtype) for n in (1, 6, 70, 3000)]
    weights.append(np.abs(random.normal(size=2000)).astype(dtype))
    scores = []
    for weight in weights:
        squares = np.square(np.sort(weight).astype("float64") / (weight.max() or 1))
        left = np.cumsum(squares[::-1])[::-1]
        score = np.divide(squares, left, out=np.zeros_like(squares), where=left > 0)
        score[-1] = 1.0
        scores.append(score)
    owners, joined = np.repeat(np.arange(5), [len(score) for score in scores]), np.concatenate(scores)
    for kept in (5, 9, 400, 2500, 5000, len(joined)):
        # Of equal scores the first weight keeps its own.
        order = np.argsort(-joined, kind="stable")[:kept]
        assert entries_kept(weights, kept) == np.bincount(owners[order], minlength=5).tolist()


def test_lamp_refuses_importances_below_zero_and_keeps_an_entry_of_zeros():
    layouts = [WeightGeometry((4,), (), ()), WeightGeometry((4,), (), ())]
    with pytest.raises(ValueError, match="at least 0. Received: -1"):
        LAMP().sparsities(0.5, layouts, [np.array([1, 2, -1, 0.5]), np.ones(4)])
    assert LAMP().sparsities(0.75, layouts, [np.zeros(4), np.ones(4)]) == [0.75, 0.75]


@pytest.mark.parametrize("normalization", ["mean", "l2"])
def test_a_normalized_importance_is_divided_by_its_norm(normalization):
    importance = np.random.default_rng(0).normal(size=(4, 5)).astype("float32") * 1e-25
    norm = np.abs(importance.astype("float64"))
    norm = norm.mean() if normalization == "mean" else np.sqrt(np.square(norm).sum())
    found = np.asarray(Global(normalization).normalized(importance))
    np.testing.assert_allclose(found, importance / norm, rtol=1e-5)
    assert not np.asarray(Global(normalization).normalized(np.zeros(3, "float32"))).any()


def test_an_unknown_normalization_is_refused():
    with pytest.raises(ValueError, match="`normalization` is none, mean or l2. Received: 'sum'"):
        Global("sum")
