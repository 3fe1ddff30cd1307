"""The pattern of a pruned weight is seen from its zeros alone."""

import numpy as np
import pytest
from keras import ops
from plain_patterns import INF, pool

from prunekit.sparsity.detection import detect
from prunekit.sparsity.patterns import NM, Block, Channel, Unstructured
from prunekit.sparsity.selection import keep_largest, pruned_count

pytestmark = pytest.mark.every_backend
DETECTED = [
    (Unstructured(), 0.5, "unstructured"),
    (Unstructured(), 0.9, "unstructured"),
    (Unstructured(), 0.05, "unstructured"),
    (NM(2, 4), 0.5, "2:4"),
    (NM(1, 4), 0.75, "1:4"),
    (NM(4, 8), 0.5, "4:8"),
    (NM(1, 2), 0.5, "1:2"),
    (NM(8, 32), 0.75, "8:32"),
    (NM(2, 4), 0.3, "unstructured"),
    (Block(4, 1), 0.5, "block 4x1"),
    (Block(16, 1), 0.8, "block 16x1"),
    (Block(1, 4), 0.5, "block 1x4"),
    (Block(4, 4, "max"), 0.9, "block 4x4"),
    (Block(5, 3), 0.5, "block 5x3"),
    (Channel(), 0.5, "channel"),
    (Channel(), 0.9, "channel"),
]


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


@pytest.mark.one_backend
@pytest.mark.parametrize("shape", [(32, 1), (8, 1), (16, 2), (4, 4), (32, 3), (64, 10), (128, 16), (3, 3, 8, 4)])
def test_zeros_at_random_places_show_no_groups(shape):
    rng = np.random.default_rng(9)
    in_axes, out_axes = ((0,), (1,)) if len(shape) == 2 else ((2,), (3,))
    for kept in np.linspace(0.05, 0.95, 19):
        for _ in range(30):
            mask = np.zeros(np.prod(shape), bool)
            mask[rng.permutation(mask.size)[: round(kept * mask.size)]] = True
            found = detect(mask.reshape(shape), in_axes, out_axes)
            assert ":" not in found, (kept, found)


@pytest.mark.one_backend
def test_one_group_proves_nothing_and_several_do():
    kept = np.zeros((32, 1), bool)
    kept[[1, 5, 6, 11, 20, 31]] = True
    assert detect(kept, (0,), (1,)) == "unstructured"
    rng = np.random.default_rng(4)
    for n, m in ((1, 2), (2, 4), (1, 4), (4, 8)):
        groups = np.stack([rng.permutation(m) < n for _ in range(24)])
        assert detect(groups.reshape(-1, 1), (0,), (1,)) == f"{n}:{m}"
        assert detect(groups[:1].reshape(-1, 1), (0,), (1,)) != f"{n}:{m}"
