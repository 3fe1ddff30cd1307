"""Bytes of mixtures: those of the weights and channels that are left."""

import keras
import numpy as np
import pytest
from keras import layers as L
from searched_models import FITTED, FLOATS, network, walk

from prunekit.core.statistics.layer_products import product_of
from prunekit.searching.choice import Unreachable
from prunekit.searching.costs import Costs
from prunekit.searching.searched_model import SearchedModel
from prunekit.searching.table import RemovalRow, Table, WeightRow, levels_for, scan
from prunekit.techniques.quantize.options import QuantizationOptions

pytestmark = pytest.mark.every_backend


def test_counted_bytes_are_those_of_the_smaller_weights():
    model = network()
    # A weight of low rank.
    draw, hidden = np.random.default_rng(7), model.get_layer("hidden").kernel
    hidden.assign(0.1 * draw.normal(size=(hidden.shape[0], 5)) @ draw.normal(size=(5, 16)))
    subject = SearchedModel(model, FITTED, FLOATS)
    levels = levels_for(packed=False)
    work = walk(model, subject)
    table, _ = scan(subject, lambda: work, levels, Table(), lambda _: None)
    costs = Costs(subject, table, packed=False)
    low, high = costs.errors
    low_rank = 0
    for bound in np.geomspace(max(low, 1e-9) * 1.01, high, 6):
        mixture = costs.least("bytes", {"error": float(bound)})
        assert mixture.error <= bound
        removed = subject.removed({name: kept for name, kept in mixture.kept.items()})
        sizes = subject.channels.sizes(subject.channels.kept_numbers(removed))
        expected = 0.0
        for name, level in mixture.levels.items():
            target = subject.products[name].target
            size = sizes.get(id(target.variable), target.size)
            outs = {name.partition("/")[0]: None}
            layer = model.get_layer(next(iter(outs)))
            kept = [
                mixture.kept[group.name]
                for group in subject.channels.groups
                for member in group.members
                if member.weight == name and member.axis == len(target.shape) - 1
            ]
            units = kept[0] if kept else layer.kernel.shape[-1]
            stored = target.size * 4 if target.size < 64 else size * level.bits / 8
            if level.structure is not None:
                first, second = subject.layouts[name].shapes(level.structure)
                (rank,) = level.structure.ranks
                inputs = size / target.size * layer.kernel.shape[-1] / units
                stored = (np.prod(first) * inputs + np.prod(second) * units / layer.kernel.shape[-1]) * level.bits / 8
                stored += 8 * rank + 600
                low_rank += 1
            expected += stored + 8 * units
        # Zero points, once for all layers of a group.
        expected += 8 * sum(mixture.kept.values())
        assert mixture.costs["bytes"] == pytest.approx(expected, rel=0.02)
    assert low_rank
    assert product_of(subject.targets[0]).target.name in subject.products


def separable():
    keras.utils.set_random_seed(4)
    inputs = keras.Input((8, 8, 2))
    x = L.Conv2D(12, 1, activation="relu", name="stem")(inputs)
    x = L.DepthwiseConv2D(3, depth_multiplier=1, name="depthwise")(x)
    return keras.Model(inputs, L.Dense(5, name="head")(L.GlobalAveragePooling2D()(x)))


def test_weights_that_were_not_measured_have_8_bits_and_are_counted():
    model = separable()
    subject = SearchedModel(model, FITTED, QuantizationOptions(full_integer=True))
    rows = [WeightRow(name, 0.0, 8, 0.0, 0.0, (8.0,)) for name in subject.products]
    removals = tuple(RemovalRow("stem", 12, kept, 0.1 * (12 - kept)) for kept in (12, 6))
    found = []
    for weights in (rows, ()):
        costs = Costs(subject, Table({}, tuple(weights), removals), packed=False)
        assert costs.counted == ("bytes", "arena")
        mixture = costs.least("bytes", {"error": 1.0})
        assert set(mixture.levels) == set(subject.products) and mixture.kept == {"stem": 6}
        found.append(mixture.costs)
    assert found[0] == found[1]
    # An entry, a scale and a bias: of 2 x 6 and 9 x 6 entries with 6 channels each, and of 6 x 5 with 5; 6 zero points.
    assert found[0]["bytes"] == 2 * 6 + 9 * 6 + 6 * 5 + 8 * (6 + 6 + 5) + 8 * 6


@pytest.mark.thorough
@pytest.mark.parametrize(("packed", "least"), [(False, 8), (True, 4)])
def test_a_table_of_few_bits_is_counted_with_a_scale_for_each_row(packed, least):
    model = keras.Sequential(
        [
            keras.Input((12,), dtype="int32"),
            L.Embedding(500, 16, name="table"),
            L.GlobalAveragePooling1D(),
            L.Dense(3, name="head"),
        ]
    )
    words = np.random.default_rng(5).integers(0, 500, (96, 12)).astype("int32")
    subject = SearchedModel(model, words, QuantizationOptions())
    rows = [WeightRow("table/embeddings", 0.0, bits, 0.0, 1 / bits, (float(bits),)) for bits in (8, 4)]
    costs = Costs(subject, Table({}, tuple(rows)), packed=packed)
    found = {bits: costs.least("bytes", {"error": 1.01 / bits}).costs["bytes"] for bits in (8, 4)}
    assert {one.bits for one in costs.least("bytes", {"error": 0.26}).levels.values()} == {8, least}
    assert found[8] - found[4] == (500 * 16 * 4 / 8 - 500 * 4 if packed else 0)


def test_of_two_arrays_of_low_rank_one_loses_the_inputs_and_one_the_outputs():
    model = network()
    subject = SearchedModel(model, FITTED, FLOATS)
    kept = {"hidden": 6} | {name: 4 for name in subject.orders if name != "hidden"}
    removals = tuple(
        RemovalRow(name, one.total, n, 0.1 * (one.total - n))
        for name, one in subject.orders.items()
        for n in (one.total, kept[name])
    )
    bytes_of = {}
    for form, rank in (("", 0), ("pair", 3)):
        rows = [WeightRow(name, 0.0, 8, 0.0, 0.0, (8.0,)) for name in subject.products if name != "hidden/kernel"]
        rows.append(WeightRow("hidden/kernel", 0.0, 8, 0.0, 0.0, (8.0,) * (2 if form else 1), form, rank))
        mixture = Costs(subject, Table({}, tuple(rows), removals), packed=True).least("bytes", {"error": 100.0})
        assert mixture.kept == kept
        bytes_of[form] = mixture.costs["bytes"]
    # Of 3 x 3 positions with 12 channels and 16 outputs, 4 channels and 6 outputs are left.
    assert bytes_of["pair"] - bytes_of[""] == pytest.approx(3 * (9 * 4 + 6) + 8 * 3 + 200 - 9 * 4 * 6)


@pytest.mark.thorough
@pytest.mark.parametrize("planned", [True, False])
def test_where_arenas_are_bounded_a_low_rank_that_needs_less_is_kept(planned):
    layers = [keras.Input((100,)), L.Dense(100, name="wide"), L.Dense(3, name="head")]
    numbers = np.random.default_rng(5).normal(size=(96, 100)).astype("float32")
    subject = SearchedModel(keras.Sequential(layers), numbers, FLOATS)
    # As a whole, the weight has fewer bytes and less error.
    rows = [WeightRow("head/kernel", 0.0, 8, 0.0, 0.0, (8.0,)), WeightRow("wide/kernel", 0.0, 8, 0.0, 0.0, (1.0,))]
    rows.append(WeightRow("wide/kernel", 0.0, 8, 0.0, 0.1, (8.0, 8.0), "pair", 10))
    costs = Costs(subject, Table({}, tuple(rows)), packed=True, planned=planned)
    bounds = {"error": 1.0, "arena": 150}
    if planned:
        found = costs.least("bytes", bounds)
        assert found.levels["wide/kernel"].structure.ranks == (10,) and found.costs["arena"] == 110
    else:
        with pytest.raises(Unreachable):
            costs.least("bytes", bounds)


def test_weights_without_levels_count_where_they_lose_channels():
    keras.utils.set_random_seed(6)
    inputs = keras.Input((6, 16))
    x = L.MultiHeadAttention(4, 8, name="attention")(inputs, inputs)
    x = L.LSTM(12, name="lstm")(x)
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    subject = SearchedModel(model, FITTED.reshape(96, 8, 16)[:, :6], FLOATS)
    assert {one.name for one in subject.skipped if "8 bits" in one.reason} >= {"lstm/kernel", "lstm/recurrent_kernel"}
    assert "attention/query/kernel" in subject.products and "attention/query/kernel" not in subject.layouts
    rows = [
        RemovalRow(name, one.total, n, 0.1 * (one.total - n))
        for name, one in subject.orders.items()
        for n in (one.total, 1)
    ]
    table = Table({}, (WeightRow("head/kernel", 0.0, 8, 0.0, 0.0, (7.0,)),), tuple(rows))
    costs = Costs(subject, table, packed=False)
    whole, least = (costs.least("bytes", {"error": bound}) for bound in (1e-12, 1e6))
    assert set(whole.kept) == set(subject.orders) and set(least.kept.values()) == {1}
    names = {weight.path: weight for weight in model.weights}
    several = [weight for path, weight in names.items() if len(weight.shape) > 1 and "head" not in path.split("/")[-2]]
    assert (
        whole.costs["bytes"] > 0.6 * sum(np.prod(weight.shape) for weight in several)
        and least.costs["bytes"] < 0.2 * whole.costs["bytes"]
    )
