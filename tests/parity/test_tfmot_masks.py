"""Masks beside those of tensorflow-model-optimization: kept counts, ties, zeros, blocks, m by n."""

import keras
import numpy as np
import original
import pytest
from one_weight import holding, tfmot_mask

import prunekit as pk
from prunekit.sparsity.patterns import NM, Block
from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.pruner import Pruner
from prunekit.techniques.pruning.training.pruner_run import PrunerRun

SIZES = [1, 2, 3, 4, 5, 7, 10, 16, 33, 100, 1001]
FRACTIONS = [0.0, 0.001, 0.05, 0.15, 0.25, 0.35, 0.45, 0.5, 0.55, 0.75, 0.95, 0.999]


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


AWKWARD = {
    "all different": values(6, 7),
    "all equal": np.full((6, 7), -0.5, "float32"),
    "all zero": np.zeros((6, 7), "float32"),
    "two values": np.tile(np.array([0.1, -0.2], "float32"), 21).reshape(6, 7),
    "mostly zero": np.where(values(6, 7, seed=1) > 0.7, values(6, 7), 0).astype("float32"),
    "few values": np.round(values(6, 7) * 2).astype("float32"),
    "signed zeros and small ones": np.array([[0.0, -0.0, 2e-38, -2e-38, 3e-38, 3.0]], "float32"),
    "infinite": np.array([[np.inf, -np.inf, 1, 2, -3, 0]], "float32"),
    "one": np.array([[0.3]], "float32"),
}


# ---- policy="tfmot" is the original


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("size", SIZES)
def test_tfmot_keeps_as_many_as_the_original(size):
    weight = np.random.default_rng(size).permutation(np.arange(1, size + 1, dtype="float32")).reshape(size, 1)
    for asked in FRACTIONS:
        np.testing.assert_array_equal(tfmot_mask(weight, asked), original.mask_of(weight, asked), err_msg=f"{asked}")


@pytest.mark.parametrize("asked", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("name", AWKWARD)
def test_tfmot_masks_are_the_originals_ties_and_zeros_included(name, asked):
    weight = AWKWARD[name]
    np.testing.assert_array_equal(tfmot_mask(weight, asked), original.mask_of(weight, asked))


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5), (2, 2, 2, 3, 4)], ids=str)
def test_tfmot_prunes_convolutions_by_the_weight_like_the_original(shape):
    weight = np.round(values(*shape) * 3).astype("float32")
    np.testing.assert_array_equal(tfmot_mask(weight, 0.6), original.mask_of(weight, 0.6))


BLOCKS = [
    ((8, 8), (2, 2)),
    ((8, 12), (4, 1)),
    ((8, 12), (1, 4)),
    ((5, 6), (4, 2)),
    ((5, 6), (2, 4)),
    ((9, 7), (4, 3)),
    ((33, 17), (16, 4)),
    ((10, 3), (3, 1)),
    ((6, 2), (5, 1)),
]


@pytest.mark.parametrize("pooling", ["average", "max"])
@pytest.mark.parametrize("shape, block", BLOCKS, ids=str)
@pytest.mark.short(cases=2)
def test_tfmot_blocks_are_the_originals_ragged_edges_included(shape, block, pooling):
    for weight in (values(*shape), np.round(values(*shape, seed=2) * 2).astype("float32")):
        for asked in (0.25, 0.5, 0.75):
            mask = tfmot_mask(weight, asked, pattern=Block(*block, pooling))
            theirs = original.mask_of(weight, asked, block=block, pooling=pooling[:3].upper().replace("AVE", "AVG"))
            np.testing.assert_array_equal(mask, theirs)


@pytest.mark.parametrize("zeros, length", [(1, 2), (2, 4), (1, 4), (3, 4), (5, 8), (20, 32)])
@pytest.mark.parametrize("shape", [(16, 5), (7, 3), (1, 4), (3, 3, 6, 4), (1, 1, 9, 2)], ids=str)
def test_tfmot_m_by_n_is_the_original_tails_included(shape, zeros, length):
    for weight in (values(*shape), np.round(values(*shape)).astype("float32")):
        mask = tfmot_mask(weight, 0.3, pattern=NM(length - zeros, length))
        np.testing.assert_array_equal(mask, original.mask_of(weight, m_by_n=(zeros, length)))


def test_tfmot_masks_of_a_decay_follow_weights_that_change():
    theirs = original.Masker(values(9, 5), original.sparsity.PolynomialDecay(0.2, 0.9, 1, 40, frequency=3))
    model = holding(values(9, 5))
    pruner = PrunerRun(model, PolynomialDecay(0.2, 0.9, 1, 40, frequency=3), PruningOptions(**{"policy": "tfmot"}))
    pruner.begin()
    for step in range(1, 50):
        weight = values(9, 5, seed=step)
        theirs.weight.assign(weight)
        model.set_weights([weight])
        pruner.step()
        mask = theirs.at(step, compiled=True)
        np.testing.assert_array_equal(pruner.masks[pruner.targets[0].name], mask)
        np.testing.assert_array_equal(model.get_weights()[0], weight * mask)


# ---- differences: (tensorflow-model-optimization, policy="tfmot", prunekit's own)


@pytest.mark.filterwarnings("ignore:Sparsity .* leaves at most one unit of these weights:UserWarning")
@pytest.mark.parametrize(
    "size, asked, theirs, own",
    # Halves go to the even count on both sides: of what is kept there, of what is removed here.
    [
        (7, 0.5, 4, 3),
        (5, 0.5, 2, 3),
        (3, 0.5, 2, 1),
        (10, 0.05, 10, 10),
        (10, 0.15, 8, 8),
        # Both keep at least one.
        (10, 0.95, 1, 1),
        (3, 0.9, 1, 1),
    ],
)
def test_difference_counts(size, asked, theirs, own, pruned_once):
    weight = np.arange(1, size + 1, dtype="float32").reshape(size, 1)
    assert original.mask_of(weight, asked).sum() == theirs
    assert pruned_once(weight, asked, policy="tfmot").sum() == theirs
    assert pruned_once(weight, asked).sum() == own == max(size - round(asked * size), 1)


@pytest.mark.parametrize(
    "weight, asked, theirs",
    [
        (np.ones((10, 4), "float32"), 0.5, 40),
        (np.repeat([0.0, 1.0], [28, 12]).astype("float32").reshape(10, 4), 0.5, 40),
        (np.repeat([1.0, 2.0], [30, 10]).astype("float32").reshape(10, 4), 0.5, 40),
    ],
    ids=["all equal", "70 % zero already", "a tie at the threshold"],
)
def test_difference_ties_are_all_kept_or_broken_by_position(weight, asked, theirs, pruned_once):
    assert original.mask_of(weight, asked).sum() == theirs
    assert pruned_once(weight, asked, policy="tfmot").sum() == theirs
    assert pruned_once(weight, asked).sum() == 20
    assert pruned_once(weight, asked).ravel()[-10:].all() == (weight.ravel()[-1] > weight.ravel()[0])


def test_difference_a_sparse_model_is_pruned_again():
    """At 0.557, on the way from 0 to 0.8, a model that is 80 % sparse becomes dense; prunekit leaves it as it was."""
    weight = values(20, 20)
    weight[np.abs(weight) < np.quantile(np.abs(weight), 0.8)] = 0
    schedule = PolynomialDecay(0.0, 0.8, 0, 3, frequency=1)
    theirs = original.Masker(weight, original.sparsity.PolynomialDecay(0.0, 0.8, 0, 3, frequency=1))
    assert theirs.at(1).mean() == 1.0

    def after_one_step(**options):
        model = holding(weight)
        pruner = PrunerRun(model, schedule, PruningOptions(**options))
        pruner.begin()
        if options:
            pruner.step()
        return pruner.masks[pruner.targets[0].name]

    assert after_one_step(policy="tfmot").mean() == 1.0
    assert after_one_step().mean() == pytest.approx(0.2)


def test_difference_pruned_weights_grow_back():
    """Two weights change places in size: the original's mask follows; prunekit's holds what was pruned at zero."""
    first, second = (np.array([row], "float32").T for row in ([3, 1, 0.1, 2], [1, 3, 0.1, 2]))
    theirs = original.Masker(first)
    assert theirs.at(1).ravel().tolist() == [True, False, False, True]
    theirs.weight.assign(second)
    assert theirs.at(2).ravel().tolist() == [False, True, False, True]

    def after_both(**options):
        model = holding(first)
        with Pruner(model, ConstantSparsity(0.5, 0, frequency=1), **options) as pruner:
            pruner.step()
            model.set_weights([second])
            pruner.step()
        return pruner.masks[pruner.targets[0].name].ravel().tolist()

    assert after_both(policy="tfmot") == [False, True, False, True]
    assert after_both() == [True, False, False, True]


def test_difference_blocks_at_a_ragged_edge(pruned_once):
    """The largest weight, 9, goes: SAME padding pools it in the window after the one whose block it is in."""
    weight = np.array([[1, 1], [1, 1], [1, 1], [9, 9], [0, 0]], "float32")
    theirs = original.mask_of(weight, 0.5, block=(4, 1), pooling="MAX")
    assert theirs.all(axis=1).tolist() == [False, False, False, False, True]
    np.testing.assert_array_equal(pruned_once(weight, 0.5, pattern=Block(4, 1, "max"), policy="tfmot"), theirs)
    own = pruned_once(weight, 0.5, pattern=Block(4, 1, "max"))
    assert own.all(axis=1).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize(
    "shape, block", [((5, 1), (2, 1)), ((5, 3), (2, 4)), ((2, 8), (2, 4)), ((3, 4, 4), (2, 2))], ids=str
)
def test_difference_blocks_that_the_original_fails_on(shape, block, pruned_once):
    weight = values(*shape)
    with pytest.raises(ValueError, match=r"rank|2-dimensional"):
        original.mask_of(weight, 0.5, block=block)
    with pytest.raises(ValueError, match=r"at least 2 blocks along each, and fails on others\. Received: block"):
        pruned_once(weight, 0.5, pattern=Block(*block), policy="tfmot")
    assert 0 < pruned_once(weight, 0.5, pattern=Block(*block)).mean() < 1


def test_a_block_of_one_weight_is_no_block(pruned_once):
    weight = values(3, 4, 4)
    theirs = original.mask_of(weight, 0.5, block=(1, 1), pooling="MAX")
    np.testing.assert_array_equal(pruned_once(weight, 0.5, pattern=Block(1, 1, "max"), policy="tfmot"), theirs)


def test_difference_m_by_n_ignores_the_schedule_and_takes_any_length(pruned_once):
    weight = values(7, 3)
    theirs = original.mask_of(weight, 0.9, m_by_n=(2, 4))
    assert theirs.mean(axis=0).tolist() == pytest.approx([4 / 7] * 3)  # the tail of 3 keeps 2
    np.testing.assert_array_equal(pruned_once(weight, 0.9, pattern="2:4", policy="tfmot"), theirs)
    with pytest.raises(ValueError, match="multiple of 4"):
        pruned_once(weight, 0.5, pattern="2:4")
    with pytest.raises(ValueError, match="ends at sparsity 0.5"):
        pruned_once(values(8, 3), 0.9, pattern="2:4")


def test_difference_m_by_n_is_made_once_at_step_1():
    theirs = original.Masker(values(8, 3), original.sparsity.ConstantSparsity(0.9, 5, frequency=1), m_by_n=(2, 4))
    model = holding(values(8, 3))
    pruner = PrunerRun(
        model, ConstantSparsity(0.9, 5, frequency=1), PruningOptions(**{"pattern": "2:4", "policy": "tfmot"})
    )
    pruner.begin()
    for step in range(1, 9):
        weight = values(8, 3, seed=step)
        theirs.weight.assign(weight)
        model.set_weights([weight])
        assert pruner.step() == (step == 1)
        np.testing.assert_array_equal(next(iter(pruner.masks.values())), theirs.at(step))
    with pytest.raises(ValueError, match="ends at sparsity 0.5"):
        PrunerRun(model, ConstantSparsity(0.9, 5), PruningOptions(**{"pattern": "2:4"}))
    gradual = PrunerRun(model, PolynomialDecay(0.0, 0.5, 0, 10, frequency=1), PruningOptions(**{"pattern": "2:4"}))
    assert gradual.schedule.update_steps(10) == list(range(11))


def test_difference_m_by_n_of_kernels_with_three_axes(pruned_once):
    weight = values(3, 8, 4)
    with pytest.raises(ValueError, match="not supported"):
        original.mask_of(weight, m_by_n=(2, 4))
    with pytest.raises(ValueError, match="kernels with 2 or 4 axes"):
        pruned_once(weight, 0.5, pattern="2:4", policy="tfmot")
    assert pruned_once(weight, 0.5, pattern="2:4").reshape(3, 2, 4, 4).sum(axis=2).tolist() == [[[2] * 4] * 2] * 3


def test_difference_m_by_n_lies_along_the_last_axis_but_one_or_along_the_inputs():
    """A transposed convolution stores its inputs last: 8 outputs in groups there, 4 inputs here."""
    weight = values(2, 2, 8, 4)
    layer = keras.layers.Conv2DTranspose(8, 2, use_bias=False)
    model = keras.Sequential([keras.Input((3, 3, 4)), layer])

    def own(**options):
        model.set_weights([weight])
        pk.prune(model, 0.5, pattern="2:4", **options)
        return np.asarray(model.get_weights()[0]) != 0

    theirs = original.mask_of(weight, m_by_n=(2, 4))
    np.testing.assert_array_equal(own(policy="tfmot"), theirs)
    assert (theirs.reshape(2, 2, 2, 4, 4).sum(axis=3) == 2).all() and (theirs.sum(axis=-1) != 2).any()
    assert (own().sum(axis=-1) == 2).all() and (own().reshape(2, 2, 2, 4, 4).sum(axis=3) != 2).any()


def test_difference_masked_values():
    """Products there: negative zeros, and NaN of what is infinite; here the weight is replaced."""
    weight = np.array([[-1.0], [3.0], [2.0], [-4.0]], "float32")
    theirs = original.Masker(weight)
    assert theirs.at(1).ravel().tolist() == [False, True, False, True]
    np.testing.assert_array_equal(np.signbit(theirs.masked()).ravel(), [True, False, False, True])
    theirs.weight.assign(np.where(weight == 2, np.inf, weight))
    assert np.isnan(theirs.masked()[2])
    for options in ({"policy": "tfmot"}, {"criterion": "magnitude"}):
        model = holding(weight)
        pk.prune(model, 0.5, **options)
        kernel = model.get_weights()[0].ravel()
        assert kernel.tolist() == [0.0, 3.0, 0.0, -4.0] and not np.signbit(kernel[0])


def test_difference_weights_that_are_nan(pruned_once):
    """The original ranks NaN above all numbers and keeps none of it; prunekit refuses under both rules."""
    weight = np.array([[1, 2, np.nan, 4, 5, 6, 7, 8]], "float32")
    assert original.mask_of(weight, 0.5).ravel().tolist() == [False] * 4 + [True] * 4
    for options in ({}, {"policy": "tfmot"}):
        with pytest.raises(ValueError, match="importances that are NaN"):
            pruned_once(weight, 0.5, **options)
