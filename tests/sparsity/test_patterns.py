"""Every pattern goes through the same battery against a plain version with loops; see `loop_pool` and `loop_expand`."""

import dataclasses
import itertools
import math
import pickle

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from keras import ops
from plain_patterns import FAMILY, INF, LENGTH, expand, groups_of_m, loop_expand, loop_pool, pool, unit_keys

from prunekit.sparsity.patterns import NM, Block, Channel, Pattern, Unstructured, get_pattern
from prunekit.sparsity.selection import keep_largest, pruned_count

pytestmark = pytest.mark.every_backend
# (shape, input axes, output axes): every rank, ragged edges, axes in and out of order, several axes on a side.
LAYOUTS = {
    "bias": ((7,), (), (0,)),
    "dense": ((8, 5), (0,), (1,)),
    "dense ragged": ((17, 7), (0,), (1,)),
    "dense long": ((40, 3), (0,), (1,)),
    "dense turned": ((5, 12), (1,), (0,)),
    "one by one": ((1, 1), (0,), (1,)),
    "one output": ((12, 1), (0,), (1,)),
    "convolution 1d": ((3, 8, 5), (1,), (2,)),
    "convolution 2d": ((3, 2, 12, 4), (2,), (3,)),
    "transposed 2d": ((2, 3, 4, 12), (3,), (2,)),
    "convolution 3d": ((2, 1, 3, 8, 3), (3,), (4,)),
    "attention query": ((12, 2, 3), (0,), (1, 2)),
    "attention output": ((3, 4, 5), (0, 1), (2,)),
    "axes out of order": ((4, 5, 3), (2, 0), (1,)),
    "negative axes": ((3, 8, 5), (-2,), (-1,)),
}


# What goes in --------------------------------------------------------------------------------------------------------


def importances(shape, seed: int = 0) -> dict[str, np.ndarray]:
    """Whole numbers, so that sums are exact in any order; the awkward cases by name."""
    rng = np.random.default_rng(seed)
    values = rng.permutation(math.prod(shape)).reshape(shape).astype("float32")
    pruned = values.copy()
    pruned[rng.random(shape) < 0.6] = -INF
    with_plus = pruned.copy()
    with_plus[rng.random(shape) < 0.1] = INF
    return {
        "distinct": values,
        "ties": rng.integers(0, 2, shape).astype("float32"),
        "all equal": np.ones(shape, "float32"),
        "all zero": np.zeros(shape, "float32"),
        "negative": -values,
        "partly pruned": pruned,
        "partly pruned and spared": with_plus,
        "all pruned": np.full(shape, -INF, "float32"),
    }


CASES = [
    pytest.param(pattern, *layout, id=f"{pattern}-{name}")
    for pattern in FAMILY
    for name, layout in LAYOUTS.items()
    if not (isinstance(pattern, NM) and math.prod(layout[0][axis] for axis in layout[1]) % pattern.m)
]


def averages(pattern) -> bool:
    return isinstance(pattern, Channel) or getattr(pattern, "pooling", None) == "average"


def largest(pooled: np.ndarray, kept: int) -> np.ndarray:
    """What `keep_largest` promises, by a stable sort; the radix selection is slow when it runs eagerly."""
    mask = np.zeros(pooled.size, bool)
    mask[np.argsort(-pooled.ravel(), kind="stable")[:kept]] = True
    return mask.reshape(pooled.shape)


@pytest.mark.one_backend
def test_every_pattern_of_the_module_is_in_the_family_and_meets_some_layout():
    assert {type(pattern) for pattern in FAMILY} == set(Pattern.__subclasses__())
    assert {str(case.values[0]) for case in CASES} == {str(pattern) for pattern in FAMILY}


@pytest.mark.parametrize(("pattern", "shape", "in_axes", "out_axes"), CASES)
@pytest.mark.short(cases=92)
def test_pool_is_the_plain_version(pattern, shape, in_axes, out_axes):
    for name, importance in importances(shape).items():
        expected = loop_pool(pattern, importance, in_axes, out_axes)
        pooled = pool(pattern, importance, in_axes, out_axes)
        assert pooled.size == pattern.units(shape, in_axes, out_axes) == expected.size
        # Averages are a float32 sum times a float32 reciprocal: two roundings at most. All else is exact.
        rtol = 2e-7 if averages(pattern) else 0
        np.testing.assert_allclose(pooled.ravel(), expected.astype("float32"), rtol=rtol, atol=0, err_msg=name)


@pytest.mark.parametrize(("pattern", "shape", "in_axes", "out_axes"), CASES)
@pytest.mark.short(cases=92)
def test_expand_is_the_plain_version_for_a_unit_mask_of_any_shape(pattern, shape, in_axes, out_axes):
    units = pattern.units(shape, in_axes, out_axes)
    rng = np.random.default_rng(3)
    for unit_mask in [rng.random(units) < 0.5, np.zeros(units, bool), np.ones(units, bool)]:
        mask = expand(pattern, unit_mask, shape, in_axes, out_axes)
        assert mask.dtype == bool and mask.shape == shape
        np.testing.assert_array_equal(mask, loop_expand(pattern, unit_mask, shape, in_axes, out_axes))
    pooled = pattern.pool(ops.ones(shape), in_axes, out_axes)
    unit_mask = rng.random(tuple(pooled.shape)) < 0.5
    np.testing.assert_array_equal(
        expand(pattern, unit_mask, shape, in_axes, out_axes),
        loop_expand(pattern, unit_mask.ravel(), shape, in_axes, out_axes),
    )


@pytest.mark.parametrize(("pattern", "shape", "in_axes", "out_axes"), CASES)
@pytest.mark.short(cases=92)
def test_a_mask_removes_the_exact_number_of_units_and_only_ever_shrinks(pattern, shape, in_axes, out_axes):
    units = pattern.units(shape, in_axes, out_axes)
    mask = np.ones(shape, bool)
    steps = [0.0, 0.3, 0.5, 0.5, 0.7] if not isinstance(pattern, NM) else np.linspace(0, pattern.sparsity, 5).tolist()
    for step, sparsity in enumerate(steps):
        # Another importance at every step, as in training.
        importance = np.where(mask, importances(shape, seed=step)["distinct"], -INF).astype("float32")
        pooled = pool(pattern, importance, in_axes, out_axes)
        new = expand(pattern, largest(pooled, units - pruned_count(sparsity, units)), shape, in_axes, out_axes)
        assert not (new & ~mask).any()
        removed = sum(not new[indices[0]] for indices in unit_keys(pattern, shape, in_axes, out_axes).values())
        assert removed == pruned_count(sparsity, units)
        mask = new
    if isinstance(pattern, NM):
        for group in groups_of_m(pattern, shape, in_axes, out_axes):
            assert sum(bool(mask[index]) for index in group) == pattern.n


@tensorflow_only
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("pattern", FAMILY, ids=str)
def test_a_pattern_is_the_same_in_a_graph_and_keeps_static_shapes(pattern, jit_compile):
    import tensorflow as tf

    shape, axes = (2, LENGTH, 3), ((1,), (2,))
    importance = importances(shape)["partly pruned"]

    @tf.function(jit_compile=jit_compile)
    def both(importance):
        pooled = pattern.pool(importance, *axes)
        assert pooled.shape.is_fully_defined()
        mask = pattern.expand(pooled > 50, shape, *axes)
        assert tuple(mask.shape) == shape
        return pooled, mask

    pooled, mask = both(tf.constant(importance))
    expected = pool(pattern, importance, *axes)
    np.testing.assert_array_equal(pooled.numpy(), expected)
    np.testing.assert_array_equal(mask.numpy(), expand(pattern, expected > 50, shape, *axes))


# JAX takes float64 for float32.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", *(["float64"] if BACKEND != "jax" else [])])
@pytest.mark.parametrize("pattern", FAMILY, ids=str)
def test_every_floating_point_type_is_taken_and_averages_have_at_least_32_bits(pattern, dtype):
    importance = ops.cast(ops.reshape(ops.arange(LENGTH * 3), (LENGTH, 3)) % 7, dtype)
    pooled = pattern.pool(importance, (0,), (1,))
    expected = "float32" if averages(pattern) and dtype in ("float16", "bfloat16") else dtype
    assert keras.backend.standardize_dtype(pooled.dtype) == expected


def test_an_average_of_half_precision_importances_neither_overflows_nor_loses_small_ones():
    importance = ops.cast(ops.full((4096, 2), 40.0), "float16")
    np.testing.assert_array_equal(pool(Channel(), importance, (0,), (1,)), [40.0, 40.0])
    np.testing.assert_array_equal(pool(Block(4096, 1), importance, (0,), (1,)).ravel(), [40.0, 40.0])


@tensorflow_only
@pytest.mark.parametrize("pattern", FAMILY, ids=str)
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_nan_is_still_nan_after_pooling(pattern, jit_compile):
    import tensorflow as tf

    pooled = tf.function(lambda x: pattern.pool(x, (0,), (1,)), jit_compile=jit_compile)
    for row, column in [(0, 0), (LENGTH - 1, 2), (170, 1)]:
        importance = np.ones((LENGTH, 3), "float32")
        importance[row, column] = np.nan
        assert np.isnan(pooled(tf.constant(importance)).numpy()).sum() == 1
    assert np.isnan(pooled(tf.fill((LENGTH, 3), np.float32("nan"))).numpy()).all()


@pytest.mark.parametrize("pattern", FAMILY, ids=str)
@pytest.mark.one_backend
def test_a_pattern_is_frozen_hashable_comparable_picklable_and_says_where_it_comes_from(pattern):
    assert pattern == dataclasses.replace(pattern) == pickle.loads(pickle.dumps(pattern))
    assert hash(pattern) == hash(dataclasses.replace(pattern))
    with pytest.raises(dataclasses.FrozenInstanceError):
        pattern.m = 3
    assert "Source:" in pattern.__doc__


@pytest.mark.one_backend
def test_patterns_that_differ_are_not_equal():
    assert len(set(FAMILY)) == len(FAMILY)


@pytest.mark.parametrize("pattern", [pattern for pattern in FAMILY if not isinstance(pattern, Unstructured)], ids=str)
@pytest.mark.one_backend
def test_axes_that_are_input_and_output_at_once_are_refused(pattern):
    with pytest.raises(ValueError, match=r"different axes .* Received: in_axes=\(0,\), out_axes=\(0,\)"):
        pattern.pool(ops.ones((LENGTH, 3)), (0,), (0,))


# Ranks inside groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (1, 4), (3, 4), (5, 8), (8, 16), (15, 16)])
def test_ranks_by_comparison_and_by_sorting_agree(n, m):
    rng = np.random.default_rng(5)
    groups = rng.integers(-2, 3, (2, 5, m, 40)).astype("float32")
    groups[rng.random(groups.shape) < 0.3] = -INF
    groups[rng.random(groups.shape) < 0.1] = INF
    by_rank, by_sort = (
        ops.convert_to_numpy(method(ops.convert_to_tensor(groups)))
        for method in (NM(n, m)._spared_by_rank, NM(n, m)._spared_by_sort)
    )
    np.testing.assert_array_equal(by_rank, by_sort)
    assert set(by_rank.sum(axis=2).ravel()) == {n}


def test_every_order_of_four_weights_keeps_the_two_largest():
    orders = np.array(list(itertools.product(range(4), repeat=4)), "float32").T
    mask = pool(NM(2, 4), orders, (0,), (1,)) == INF
    for column in range(orders.shape[1]):
        kept = sorted(range(4), key=lambda i: -orders[i, column])[:2]
        assert set(np.flatnonzero(mask[:, column])) == set(kept)


def test_nm_pruning_of_a_sparse_weight_ends_in_the_pattern_and_gives_nothing_back():
    """Groups with more zeros than the pattern removes must not make others keep more than n."""
    rng = np.random.default_rng(11)
    before = rng.random((64, 32)) < 0.5
    importance = np.where(before, rng.random((64, 32)), -INF).astype("float32")
    pooled = NM(2, 4).pool(ops.convert_to_tensor(importance), (0,), (1,))
    gone = int(ops.sum(ops.cast(ops.equal(pooled, -INF), "int32")))
    kept = keep_largest(pooled, 64 * 32 - max(gone, pruned_count(0.5, 64 * 32)))
    mask = ops.convert_to_numpy(NM(2, 4).expand(kept, (64, 32), (0,), (1,))) & before
    assert mask.reshape(16, 4, 32).sum(axis=1).max() == 2
    assert mask.sum() == np.minimum(before.reshape(16, 4, 32).sum(axis=1), 2).sum()


# Arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(0, 4), (4, 4), (5, 4), (-1, 4), (2, 0), (0, 0)])
@pytest.mark.one_backend
def test_nm_needs_n_between_zero_and_m(n, m):
    with pytest.raises(ValueError, match=f"needs 0 < n < m. Received: n={n}, m={m}"):
        NM(n, m)


@pytest.mark.parametrize("value", [True, 2.0, "2", None, float("nan")], ids=repr)
@pytest.mark.parametrize(
    "build", [lambda v: NM(v, 4), lambda v: NM(1, v), lambda v: Block(v, 1), lambda v: Block(1, v)]
)
@pytest.mark.one_backend
def test_a_length_that_is_no_int_is_refused(build, value):
    with pytest.raises(TypeError, match="(n|m|inputs|outputs) must be an int. Received: "):
        build(value)


@pytest.mark.parametrize("value", [0, -4])
@pytest.mark.one_backend
def test_a_block_without_weights_is_refused(value):
    with pytest.raises(ValueError, match=f"inputs must be at least 1. Received: inputs={value}"):
        Block(value, 1)
    with pytest.raises(ValueError, match=f"outputs must be at least 1. Received: outputs={value}"):
        Block(1, value)


@pytest.mark.parametrize("pooling", ["mean", "AVG", None, ""])
@pytest.mark.one_backend
def test_an_unknown_pooling_is_refused(pooling):
    with pytest.raises(ValueError, match='pooling is "average" or "max". Received: pooling='):
        Block(4, 1, pooling)


@pytest.mark.one_backend
def test_numpy_integers_become_plain_ones():
    assert type(NM(np.int64(2), np.int32(4)).n) is int
    assert type(Block(np.int64(2), 4).inputs) is int


# Check ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", FAMILY, ids=str)
@pytest.mark.one_backend
def test_a_fitting_weight_passes_the_check(pattern):
    sparsity = pattern.sparsity if isinstance(pattern, NM) else 0.5
    shape = (LENGTH, 34)
    assert pattern.check(shape, (0,), (1,), sparsity, "dense/kernel") is None


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 20)])
def test_nm_holds_where_more_than_n_weights_of_a_group_are_infinite(n, m, kind):
    importance = np.random.default_rng(0).uniform(0.1, 1.0, (4 * m, 6)).astype("float32")
    importance[:m] = INF
    importance[m : m + n + 1, 1] = INF
    for infinite in (importance, np.full_like(importance, INF)):
        pooled = NM(n, m).pool(ops.cast(infinite, kind), (0,), (1,))
        spared = keras.ops.convert_to_numpy(ops.isinf(pooled)).reshape(4, m, 6)
        assert (spared.sum(1) == n).all()
        assert ops.all(ops.isfinite(ops.where(ops.isinf(pooled), ops.zeros_like(pooled), pooled)))


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 3), (3, 8), (1, 20)])
@pytest.mark.one_backend
def test_nm_passes_only_its_own_sparsity_and_says_which(n, m):
    pattern, shape = NM(n, m), (m * 4, 5)
    for sparsity in (1 - n / m, 1 - n / m + 9e-7, 1 - n / m - 9e-7):
        pattern.check(shape, (0,), (1,), sparsity, "dense/kernel")
    for sparsity in (0.0, 1 - n / m + 2e-6, 1 - n / m - 2e-6, 0.99, float("nan")):
        with pytest.raises(ValueError, match=rf"Received: final sparsity .* for dense/kernel. Pass .* {1 - n / m!r}"):
            pattern.check(shape, (0,), (1,), sparsity, "dense/kernel")


@pytest.mark.one_backend
def test_nm_refuses_an_input_length_that_m_does_not_divide_and_a_weight_without_inputs():
    with pytest.raises(
        ValueError, match=r"multiple of 4. Received: conv/kernel of shape \(3, 3, 3, 16\), .*length 3\)"
    ):
        NM(2, 4).check((3, 3, 3, 16), (2,), (3,), 0.5, "conv/kernel")
    with pytest.raises(ValueError, match=r"2:4 needs an input axis. Received: dense/bias of shape \(8,\)"):
        NM(2, 4).check((8,), (), (0,), 0.5, "dense/bias")
    NM(2, 4).check((2, 6, 5), (0, 1), (2,), 0.5, "attention/output/kernel")


@pytest.mark.parametrize("axes", [((), (0,)), ((0,), ()), ((), ())])
@pytest.mark.one_backend
def test_a_block_refuses_a_weight_without_inputs_or_outputs(axes):
    with pytest.raises(ValueError, match="block:4x1 needs input and output axes. Received: dense/bias"):
        Block(4, 1).check((8,), *axes, 0.5, "dense/bias")


@pytest.mark.one_backend
def test_a_channel_refuses_a_weight_without_outputs():
    with pytest.raises(ValueError, match="channel needs an output axis. Received: embedding/embeddings"):
        Channel().check((8, 4), (0, 1), (), 0.5, "embedding/embeddings")


@pytest.mark.parametrize(
    ("pattern", "shape", "sparsity"),
    [(Channel(), (8, 1), 0.8), (Channel(), (8, 2), 0.9), (Block(16, 16), (10, 10), 0.51), (Block(8, 1), (8, 3), 0.9)],
)
@pytest.mark.one_backend
def test_a_pattern_that_would_remove_every_weight_is_refused(pattern, shape, sparsity):
    with pytest.raises(ValueError, match="would remove every weight of logits/kernel.*`exclude`"):
        pattern.check(shape, (0,), (1,), sparsity, "logits/kernel")


@pytest.mark.one_backend
def test_unstructured_fits_every_weight():
    Unstructured().check((), (), (), 0.99, "scalar")
    assert Unstructured().units((), (), ()) == 1


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", FAMILY, ids=str)
@pytest.mark.one_backend
def test_a_pattern_is_found_again_under_its_own_name(pattern):
    assert get_pattern(str(pattern)) == pattern
    assert get_pattern(pattern) is pattern


@pytest.mark.parametrize(
    ("name", "expected"),
    [("2:4", NM(2, 4)), ("block:4x1", Block(4, 1)), ("block:16x2:max", Block(16, 2, "max")), ("channel", Channel())],
)
@pytest.mark.one_backend
def test_a_name_gives_its_pattern(name, expected):
    assert get_pattern(name) == expected


@pytest.mark.parametrize("name", ["", "2:4:8", "2/4", "-2:4", "block", "block:4", "block:4x1:mean", "Channel", " 2:4"])
@pytest.mark.one_backend
def test_an_unknown_name_is_refused_with_the_valid_ones(name):
    with pytest.raises(ValueError, match=f"Received: '{name}'. Valid are: unstructured, channel, n:m"):
        get_pattern(name)


@pytest.mark.one_backend
def test_a_name_with_impossible_numbers_is_refused():
    with pytest.raises(ValueError, match="n=4, m=2"):
        get_pattern("4:2")
    with pytest.raises(ValueError, match="inputs=0"):
        get_pattern("block:0x4")


@pytest.mark.parametrize("pattern", [None, 2, (2, 4), NM], ids=repr)
@pytest.mark.one_backend
def test_something_that_is_no_pattern_is_refused(pattern):
    with pytest.raises(TypeError, match="A pattern is a name .* Received: "):
        get_pattern(pattern)
