"""Patterns, schedules, options, masks and gradients at the edge of what makes sense, given in Python."""

import math

import keras
import numpy as np
import pytest

import prunekit as pk
from prunekit.sparsity.patterns import Block
from prunekit.sparsity.schedules import SCHEDULES


def test_a_block_larger_than_the_weight_is_the_weight():
    importance = keras.ops.convert_to_tensor(np.arange(35, dtype="float32").reshape(5, 7))
    for pooling, expected in (("average", 17.0), ("max", 34.0)):
        # Padded to its own size, this block would be of 10 ** 18 weights.
        block = Block(10**9, 10**9, pooling)
        assert float(keras.ops.squeeze(block.pool(importance, (0,), (1,)))) == expected
        assert block.units((5, 7), (0,), (1,)) == 1
        assert np.array(block.expand(keras.ops.ones((1, 1, 1), "bool"), (5, 7), (0,), (1,))).all()
    tall = Block(10**9, 2).pool(importance, (0,), (1,))
    np.testing.assert_allclose(np.ravel(tall), [14.5, 16.5, 18.5, 20.0])


@pytest.mark.parametrize(
    "pattern",
    ["1:" + "9" * 5000, "block:" + "9" * 5000 + "x1", "2:4:8", "block:4", "4:2", "0:4", "block:0x1", "", " 2:4"],
)
def test_a_pattern_of_senseless_numbers_is_refused(perceptron, pattern):
    with pytest.raises(ValueError, match="Unknown pattern|needs 0 < n < m|puts must be at least 1") as refused:
        pk.prune(perceptron, 0.5, pattern=pattern, allocation="uniform")
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("kind", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, -1, 10**400, -(10**400), 10**5000, "3", None, True, 1j, [1], np.array([1])],
    ids=lambda value: f"{type(value).__name__} {repr(value)[:8] if type(value) is not int else value.bit_length()}",
)
def test_a_schedule_of_senseless_numbers_is_refused(kind, value):
    for name in kind.__dataclass_fields__:
        if value == -1 and name == "end_step" and kind is SCHEDULES["constant"]:
            continue
        # None, where it is the default: fitted to the training.
        if value is None and kind.__dataclass_fields__[name].default is None:
            continue
        with pytest.raises((ValueError, TypeError), match=name) as refused:
            kind(**{name: value})
        assert type(refused.value) in (ValueError, TypeError)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize("steps", [2**62, 10**15])
@pytest.mark.parametrize("kind", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_of_huge_steps_is_one(kind, steps):
    fields = kind.__dataclass_fields__
    chosen = {"end_step": steps, "step": steps, "sparsities": ((steps, 0.5),), "frequency": steps}
    schedule = kind(**{name: value for name, value in chosen.items() if name in fields})
    assert schedule(steps) == schedule.final_sparsity
    assert 0.0 <= schedule(steps - 1) <= schedule.final_sparsity
    assert schedule.latest_update(steps) is not None and len(schedule.update_steps(10)) <= 1
    assert schedule(10**400) == schedule.final_sparsity


@pytest.mark.parametrize("number", [np.int32, np.int64, np.uint8])
def test_numbers_of_numpy_are_numbers(number):
    schedule = pk.schedules.PolynomialDecay(final_sparsity=np.float32(0.5), end_step=number(8), frequency=number(2))
    assert schedule == pk.schedules.PolynomialDecay(final_sparsity=0.5, end_step=8, frequency=2)
    assert type(schedule.end_step) is int and schedule(number(8)) == 0.5


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"include": 3}, TypeError, "`include` takes a pattern or a list of patterns. Received: 3"),
        ({"exclude": None}, TypeError, "`exclude` takes a pattern or a list of patterns. Received: None"),
        ({"include": ["re:" + "(" * 5000 + ")" * 5000]}, ValueError, "is not a regular expression"),
        ({"keep_zeros": "no"}, TypeError, "`keep_zeros` is True or False. Received: 'no'"),
        ({"origin": "start"}, TypeError, "`origin` must be an int, a step of the optimizer"),
        ({"origin": math.nan}, TypeError, "`origin` must be an int, a step of the optimizer"),
        ({"origin": True}, TypeError, "`origin` must be an int, a step of the optimizer"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_options_of_the_wrong_kind_are_refused(perceptron, options, kind, match):
    with pytest.raises(kind, match=match):
        pk.prune(perceptron, 0.5, **options)
    with pytest.raises(kind, match=match):
        pk.Pruner(perceptron, pk.schedules.OneShot(), **options)


@pytest.mark.parametrize(
    "masks",
    [
        [],
        [np.ones((8, 16), bool)],
        [np.ones((8, 16), bool), np.zeros((4, 16), bool)],
        [np.ones((8, 16), bool), True],
        [np.ones((8, 16), bool), None],
        [np.ones((8, 16), bool), "x"],
        [np.ones((8, 16), bool)] * 3,
    ],
    ids=["none", "one too few", "transposed", "a scalar", "None", "text", "one too many"],
)
def test_masks_of_a_wrong_shape_are_refused_and_none_is_taken(perceptron, masks):
    pruner = pk.Pruner(perceptron, pk.schedules.OneShot(sparsity=0.5), allocation="uniform")
    before = pruner.masks
    with pytest.raises(
        ValueError, match=r"Expected one mask of the shape of each target: \[\(8, 16\), \(16, 4\)\]. Received: "
    ):
        pruner.run.store.replace(masks)
    assert all(np.array_equal(before[name], mask) for name, mask in pruner.masks.items())


@pytest.mark.parametrize("kind", ["bool", "int32", "float32", "uint8"])
def test_masks_of_another_type_keep_what_is_not_zero(perceptron, kind):
    pruner = pk.Pruner(perceptron, pk.schedules.OneShot(sparsity=0.0), allocation="uniform")
    masks = [np.random.default_rng(1).integers(0, 2, target.shape).astype(kind) for target in pruner.targets]
    pruner.run.store.replace(masks)
    for given, taken in zip(masks, pruner.masks.values(), strict=True):
        np.testing.assert_array_equal(given != 0, taken)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_gradients_that_are_not_one_per_variable_are_refused(perceptron, count):
    pruner = pk.Pruner(perceptron, pk.schedules.OneShot(sparsity=0.5), allocation="uniform")
    with pytest.raises(ValueError, match=f"aligned with the 4 trainable variables. Received: {count}"):
        pruner.mask_gradients([None] * count)
