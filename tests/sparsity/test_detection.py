"""The pattern of a pruned weight is seen from its zeros alone."""

import math

import numpy as np
import pytest
from keras import ops
from plain_patterns import INF, pool

from prunekit.sparsity.detection import detect
from prunekit.sparsity.patterns import NM, Block, Channel, Unstructured
from prunekit.sparsity.selection import keep_largest, pruned_count

# Names and NumPy: two of the tests stand for all on other backends in the short suite.
pytestmark = pytest.mark.every_backend(cases=0)
DETECTED = [
    (Unstructured(), 0.5, "unstructured"),
    (Unstructured(), 0.9, "unstructured"),
    (Unstructured(), 0.05, "unstructured"),
    (NM(2, 4), 0.5, "2:4"),
    (NM(1, 4), 0.75, "1:4"),
    (NM(4, 8), 0.5, "4:8"),
    (NM(1, 2), 0.5, "1:2"),
    (NM(4, 16), 0.75, "4:16"),
    (NM(2, 4), 0.3, "unstructured"),
    (Block(4, 1), 0.5, "block 4x1"),
    (Block(16, 1), 0.8, "block 16x1"),
    (Block(1, 4), 0.5, "block 1x4"),
    (Block(4, 4, "max"), 0.9, "block 4x4"),
    (Block(5, 3), 0.5, "block 5x3"),
    (Channel(), 0.5, "channel"),
    (Channel(), 0.9, "channel"),
]


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("shape", "in_axes", "out_axes"),
    [((64, 48), (0,), (1,)), ((3, 3, 32, 40), (2,), (3,)), ((40, 64), (1,), (0,)), ((8, 8, 4, 9), (0, 1), (2, 3))],
)
@pytest.mark.parametrize(("pattern", "sparsity", "expected"), DETECTED)
def test_the_zeros_of_a_pruned_weight_show_their_pattern(pattern, sparsity, expected, shape, in_axes, out_axes):
    weight = np.random.default_rng(2).normal(size=shape).astype("float32")
    units = pattern.units(shape, in_axes, out_axes)
    pooled = pattern.pool(ops.abs(ops.convert_to_tensor(weight)), in_axes, out_axes)
    kept = keep_largest(pooled, units - pruned_count(sparsity, units))
    mask = ops.convert_to_numpy(pattern.expand(kept, shape, in_axes, out_axes))
    assert detect(mask, in_axes, out_axes) == expected
    assert detect(np.where(mask, weight, 0), in_axes, out_axes) == expected
    assert detect(np.where(mask, weight, -0.0), in_axes, out_axes) == expected


@pytest.mark.every_backend
def test_an_array_without_zeros_is_dense_and_one_without_anything_else_is_all_zero():
    assert detect(np.ones((4, 3)), (0,), (1,)) == "dense"
    assert detect(np.full((4, 3), np.nan), (0,), (1,)) == "dense"
    assert detect(np.zeros((0, 3)), (0,), (1,)) == "dense"
    assert detect(np.float32(3.0), (), ()) == "dense"
    assert detect(np.zeros((4, 3)), (0,), (1,)) == "all zero"
    assert detect(np.zeros(5), (), (0,)) == "all zero"


def test_zeros_of_a_vector_are_unstructured():
    assert detect(np.array([1.0, 0.0, 2.0, 0.0]), (), (0,)) == "unstructured"
    assert detect(np.array([1.0, 0.0, 2.0, 0.0]), (), ()) == "unstructured"


def test_a_zero_row_of_an_embedding_is_a_block_over_all_outputs():
    table = np.ones((10, 6))
    table[0] = 0
    assert detect(table, (0,), (1,)) == "block 1x6"


def test_an_nm_pattern_is_still_seen_where_a_few_kept_weights_are_zero():
    rng = np.random.default_rng(4)
    mask = pool(NM(2, 4), rng.random((128, 64)).astype("float32"), (0,), (1,)) == INF
    mask[np.unravel_index(rng.choice(mask.size, 100, replace=False), mask.shape)] = False
    assert detect(mask, (0,), (1,)) == "2:4"


def test_one_weight_too_many_breaks_a_pattern():
    rng = np.random.default_rng(4)
    nm = pool(NM(2, 4), rng.random((128, 64)).astype("float32"), (0,), (1,)) == INF
    nm[np.argmin(nm[:, 0]), 0] = True
    assert detect(nm, (0,), (1,)) == "unstructured"
    channel = np.broadcast_to(rng.random(64) < 0.5, (128, 64)).copy()
    channel[3, np.argmin(channel[0])] = True
    assert detect(channel, (0,), (1,)) == "unstructured"


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(1, 4), NM(4, 8)], ids=str)
@pytest.mark.parametrize("shape", [(32, 12), (128, 3), (784, 300), (3, 3, 16, 8), (1, 1, 32, 16)], ids=str)
def test_nm_kernels_of_usual_sizes_are_recognised(pattern, shape):
    axes = (len(shape) - 2,), (len(shape) - 1,)
    scores = np.random.default_rng(5).random(shape).astype("float32")
    assert detect(pool(pattern, scores, *axes) == INF, *axes) == str(pattern)


@pytest.mark.parametrize("outputs", [1, 2, 3, 10, 64])
@pytest.mark.parametrize("inputs", [2, 4, 8, 16, 32, 64, 96, 256])
def test_random_zeros_are_never_an_nm_pattern(inputs, outputs):
    rng, size = np.random.default_rng(inputs * outputs), inputs * outputs
    for kept in sorted({round(size * share) for share in np.linspace(0.02, 0.98, 49)}):
        for _ in range(4):
            mask = rng.permutation(size).reshape(inputs, outputs) < kept
            assert ":" not in detect(mask, (0,), (1,))


def test_one_group_or_few_groups_are_no_evidence_of_a_pattern():
    one_group, few_groups = np.arange(32)[:, None] % 5 == 1, np.tile([1, 0, 1, 0, 0, 1, 1, 0], 4)[:, None]
    assert detect(one_group, (0,), (1,)) == "unstructured"
    assert detect(few_groups, (0,), (1,)) == "unstructured"


def test_a_reported_pattern_has_a_probability_below_one_in_a_hundred_thousand_by_chance():
    # Exactly two in each of g groups: 6**g of the binomial(4g, 2g) masks with as many zeros.
    group = np.array([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0, 1]]).reshape(
        -1, 1
    )
    chances = {groups: 6**groups / math.comb(4 * groups, 2 * groups) for groups in (12, 18)}
    assert chances[12] > 1e-5 > chances[18]
    found = [detect(np.tile(group, (groups // 6, 1)), (0,), (1,)) for groups in chances]
    assert found == ["unstructured", "2:4"]


def test_groups_that_keep_fewer_need_to_be_more():
    rng = np.random.default_rng(1)
    groups = np.stack([rng.permutation([1, 1, 0, 0]) for _ in range(60)])
    groups[0] = [1, 0, 0, 0]
    found = [detect(groups[:count].reshape(-1, 1), (0,), (1,)) for count in (20, 60)]
    assert found == ["unstructured", "2:4"]
