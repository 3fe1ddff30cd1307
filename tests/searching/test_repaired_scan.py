"""The scan: the layers that read a change are fitted, and the model is as it was; costs are those of real files."""

import functools
import math

import keras
import numpy as np
import pytest
from keras import layers as L
from networks import outputs

from prunekit.anatomy.records.plain_data import from_plain
from prunekit.core.layerwise.layerwise import LayerwiseRepair
from prunekit.core.outputs.output_error import output_error
from prunekit.core.runtime.variable_values import replaced
from prunekit.core.statistics.layer_products import product_of
from prunekit.searching.building import _sparsity, weights_of
from prunekit.searching.candidates import (
    FACTOR_SHARES,
    LayerLevels,
    Level,
    LevelSolver,
    candidates,
    entropy,
    low_rank_candidates,
    removal_changes,
)
from prunekit.searching.costs import Costs
from prunekit.searching.judge import batched
from prunekit.searching.repaired_scan import RepairedScan, ridge
from prunekit.searching.searched_model import SearchedModel
from prunekit.searching.shared_scan import ScanInputs
from prunekit.searching.table import SHARES, Levels, RemovalRow, Table, WeightRow, levels_for, scan
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.factorize.factorizing import with_structures
from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.shrink.channels.options import KeptChannels, ShrinkOptions
from prunekit.techniques.shrink.channels.shrinking import remove_channels

pytestmark = pytest.mark.every_backend

FLOATS = QuantizationOptions(activation_bits="float")
RNG = np.random.default_rng(5)
FITTED, MEASURED = (RNG.normal(size=(96, 8, 8, 2)).astype("float32") for _ in range(2))


def network():
    keras.utils.set_random_seed(4)
    inputs = keras.Input((8, 8, 2))
    x = L.Conv2D(12, 3, use_bias=False, name="stem")(inputs)
    x = L.ReLU()(L.BatchNormalization(name="norm")(x))
    y = L.Conv2D(12, 3, padding="same", activation="relu", name="branch")(x)
    x = L.Flatten()(L.AveragePooling2D(2)(L.Add()([x, y])))
    x = L.Dense(16, activation="relu", name="hidden")(x)
    return keras.Model(inputs, L.Dense(5, name="head")(x))


def walk(model, subject, fitted=FITTED, measured=MEASURED):
    products = list(subject.products.values())
    return RepairedScan(model, batched(fitted, 32), batched(measured, 48), products, 1e9, subject.written)


def whole(model):
    subject = SearchedModel(model, FITTED, FLOATS)
    return subject, walk(model, subject)


def levels_of(work, product):
    return LayerLevels(product, array_of(product.target.variable), work.moments(product))


def test_a_ridge_is_the_least_squares_fit_that_stays_near():
    rng = np.random.default_rng(0)
    for rows in (6, 40):
        x, y, near = rng.normal(size=(2, rows, 8)), rng.normal(size=(2, rows, 3)), rng.normal(size=(2, 8, 3))
        found, shift = ridge(x, y, near, centred=False)
        for group in range(2):
            added = 0.01 * np.square(x[group]).sum() / 8
            system = np.vstack([x[group], np.sqrt(added) * np.eye(8)])
            wanted = np.vstack([y[group], np.sqrt(added) * near[group]])
            np.testing.assert_allclose(found[group], np.linalg.lstsq(system, wanted, rcond=None)[0], rtol=1e-6)
        assert not shift.any()
        found, shift = ridge(x, y + 7, near, centred=True)
        left = y + 7 - x @ found - shift[:, None]
        np.testing.assert_allclose(left.mean(axis=1), 0, atol=1e-9)


def test_unchanged_values_have_no_error_and_everything_comes_back():
    model = network()
    before = [np.array(keras.ops.convert_to_numpy(weight)) for weight in model.weights]
    subject, work = whole(model)
    kernel = model.get_layer("stem").kernel
    assert work.error([(kernel, before[0])]) < 1e-10
    assert work.error([(kernel, 0.5 * before[0])]) > 0
    for was, weight in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(was, keras.ops.convert_to_numpy(weight))


def test_the_layers_behind_make_up_for_a_change():
    model = network()
    subject, work = whole(model)
    kernel = model.get_layer("stem").kernel
    value = np.array(keras.ops.convert_to_numpy(kernel))
    # The batch normalization behind follows a scale of its inputs, and undoes it.
    assert work.error([(kernel, 3 * value)]) < 1e-3
    halved = value.copy()
    halved[..., ::3] = 0
    repaired = work.error([(kernel, halved)])
    was = outputs(model, MEASURED)
    kernel.assign(halved)
    plain = output_error(was, outputs(model, MEASURED)) ** 2
    kernel.assign(value)
    assert 0 < repaired < 0.8 * plain


@pytest.mark.thorough
def test_the_widest_product_is_that_with_the_most_inputs_for_each_vector():
    model = keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.DepthwiseConv2D(3),
            keras.layers.Flatten(),
            keras.layers.Dense(6),
            keras.layers.Dense(5),
        ]
    )
    images = np.zeros((4, 12, 12, 3), "float32")
    # 27 inputs at 100 places, 9 at 64, 256 inputs at one place, 6 at one.
    assert SearchedModel(model, images, FLOATS).inputs_per_position == 256
    pooled = keras.layers.GlobalAveragePooling2D()(model.layers[1].output)
    small = keras.Model(model.inputs, keras.layers.Dense(5)(pooled))
    assert SearchedModel(small, images, FLOATS).inputs_per_position == 4


def test_with_less_memory_layers_are_fitted_to_fewer_batches():
    model = network()
    subject = SearchedModel(model, FITTED, FLOATS)
    products = list(subject.products.values())
    kernel = model.get_layer("stem").kernel
    halved = np.array(keras.ops.convert_to_numpy(kernel))
    halved[..., ::3] = 0

    def error(batches, memory):
        work = RepairedScan(model, batches, batched(MEASURED, 48), products, memory, subject.written)
        return work.error([(kernel, halved)])

    batches = batched(FITTED, 32)
    assert len(batches) > 2
    first, every = error(batches[:1], 1e9), error(batches, 1e9)
    assert error(batches, 1.0) == pytest.approx(first, rel=1e-4) != pytest.approx(every, rel=1e-4)
    assert error(batches, 1e6) < 1.5 * every


def test_calls_are_passed_in_order_and_the_last_layer_is_not_repaired():
    model = network()
    subject, work = whole(model)
    head = model.get_layer("head").kernel
    value = np.array(keras.ops.convert_to_numpy(head))
    early = work.error([(head, 0 * value)])
    while work.steps[work.at].layer is not model.get_layer("head"):
        work.advance()
    late = work.error([(head, 0 * value)])
    bias = keras.ops.convert_to_numpy(model.get_layer("head").bias)
    was = outputs(model, MEASURED)
    expected = output_error(was, [np.broadcast_to(bias, was[0].shape)]) ** 2
    assert early == pytest.approx(expected, rel=1e-4) and late == pytest.approx(expected, rel=1e-4)


def test_candidates_have_their_zeros_and_values():
    model = network()
    subject, work = whole(model)
    product = subject.products["stem/kernel"]
    target = product.target
    levels = [Level(0.5, 4), Level(0.9, 2), Level(0.0, 8), Level(0.75, None)]

    def grid_of(kernel, bits):
        return subject.grid_of(target, kernel, bits)

    for one in candidates(levels_of(work, product), levels, grid_of):
        kernel = one.values[0][1]
        assert (kernel == 0).mean() >= one.level.sparsity - 0.01
        if one.level.bits is not None:
            most = max(len(np.unique(np.abs(kernel[..., i]))) for i in range(12))
            assert most <= 2 ** (one.level.bits - 1)
            assert one.entropies[0] <= one.level.bits
    assert entropy(np.array([0, 0, 1, 1, 2, 2, 3, 3])) == pytest.approx(2.0) and entropy(np.zeros(9)) == 0


def test_a_price_of_bits_saves_entropy_and_is_what_the_quantization_does():
    model = network()
    subject, work = whole(model)
    product = subject.products["stem/kernel"]
    levels = [Level(0.0, 4), Level(0.0, 4, 0.1), Level(0.0, 4, 1.0)]
    grid = functools.partial(subject.grid_of, product.target)
    found = list(candidates(levels_of(work, product), levels, grid))
    assert found[0].entropies > found[1].entropies > found[2].entropies
    errors = [work.error(one.values) for one in found]
    assert max(errors[:2]) < errors[2]
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    options = QuantizationOptions(bits=4, activation_bits="float", method="gptq", include="stem")
    quantize_model(copy, options, FITTED, rates={"stem/kernel": 1.0})
    (dense,) = candidates(levels_of(work, product), [Level(0.0, 4, 1.0)], grid)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(copy.get_layer("stem").kernel), dense.values[0][1], atol=1e-6)


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("name", ["branch/kernel", "hidden/kernel"])
def test_candidates_of_low_rank_are_what_a_factorization_and_a_quantization_compute(name):
    model = network()
    # Most of the outputs' energy lies along few directions.
    kernel = model.get_layer(name.split("/")[0]).kernel
    left, size, right = np.linalg.svd(keras.ops.convert_to_numpy(kernel).reshape(-1, kernel.shape[-1]), False)
    kernel.assign((left * size * 0.5 ** np.arange(len(size)) @ right).reshape(kernel.shape))
    subject, work = whole(model)
    product, layout = subject.products[name], subject.layouts[name]
    while work.steps[work.at].layer is not product.target.layer:
        work.advance()
    layer, grid_of = levels_of(work, product), functools.partial(subject.grid_of_factor, product.target)
    found = list(low_rank_candidates(layer, layout, [Level(0.0, 8), Level(0.0, 4)], grid_of))
    assert len(found) >= 4 and {one.level.bits for one in found} == {8, 4}
    for one in found:
        assert len(one.entropies) == 2 and max(one.entropies) <= one.level.bits
        assert layout.parameters(one.level.structure) <= FACTOR_SHARES[0] * product.target.size
    errors = [work.error(one.values) for one in found if one.level.bits == 8]
    assert errors == sorted(errors)
    smaller, names = with_structures(model, {name: found[-1].level.structure}, FITTED)
    options = QuantizationOptions(bits=8, activation_bits="float", method="gptq", include=[name, *names[name]])
    quantize_model(smaller, options, FITTED)
    was, last = outputs(model, MEASURED), [one for one in found if one.level.bits == 8][-1]
    with replaced(last.values):
        predicted = output_error(was, outputs(model, MEASURED))
    assert predicted == pytest.approx(output_error(was, outputs(smaller, MEASURED)), rel=0.1)
    assert list(low_rank_candidates(layer, layout, [], grid_of)) == []


def test_a_removal_computes_nothing_in_the_channels_and_keeps_other_zeros():
    model = network()
    subject, work = whole(model)
    (group,) = [name for name in subject.orders if name.startswith(("stem", "norm", "branch"))][:1]
    removed = subject.removed({group: 6})
    values, masks = removal_changes(subject.channels, removed)
    changed = {id(variable): value for variable, value in values}
    branch = model.get_layer("branch")
    # The sum ties the channels of both convolutions: the second loses outputs, and is fitted on inputs that are left.
    lost = ~masks[id(branch.kernel)].any(axis=(0, 1, 2))
    assert (
        lost.sum() == 6 and not changed[id(branch.kernel)][..., lost].any() and not changed[id(branch.bias)][lost].any()
    )
    assert not changed[id(model.get_layer("stem").kernel)][..., lost].any()
    assert id(model.get_layer("hidden").kernel) not in changed


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(("group", "kept"), [("stem", 11), ("stem", 4), ("hidden", 15), ("hidden", 5)])
def test_the_error_of_a_removal_is_that_of_the_smaller_model(group, kept):
    model = network()
    subject, work = whole(model)
    predicted = work.error(*removal_changes(subject.channels, subject.removed({group: kept})))
    options = ShrinkOptions(criterion="l2", repair="weights")
    smaller = remove_channels(model, KeptChannels({group: kept}), options, FITTED).model
    assert predicted == pytest.approx(output_error(outputs(model, MEASURED), outputs(smaller, MEASURED)) ** 2, rel=0.15)


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("level", [Level(0.8), Level(0.0, 3), Level(0.6, 4)])
def test_the_errors_of_weights_add_up_to_that_of_the_mixture(level):
    model = network()
    subject, _ = whole(model)
    work = walk(model, subject)
    total = 0.0
    while work.at < len(work.steps):
        for product in subject.products.values():
            if product.target.layer is work.steps[work.at].layer:
                grid = functools.partial(subject.grid_of, product.target)
                (one,) = candidates(levels_of(work, product), [level], grid)
                total += work.error(one.values)
        work.advance()
    targets = subject.targets
    repair = LayerwiseRepair(model, targets, LevelSolver(targets, [level] * len(targets), subject.grid_of))
    repair.run(batched(FITTED, 32))
    was = outputs(model, MEASURED)
    with replaced(repair.values):
        assert 0.4 < total / output_error(was, outputs(model, MEASURED)) ** 2 < 2.5


def test_the_table_is_kept_after_each_row_and_taken_up_again():
    model = network()
    levels = Levels(tuple(Level(*one) for one in ((0.0, 8), (0.0, 3), (0.9, 8), (0.9, 3))))
    kept, told = [], []

    def scanned(known):
        subject = SearchedModel(model, FITTED, FLOATS)
        work = lambda: walk(model, subject)  # noqa: E731
        table, late = scan(subject, work, levels, known, kept.append, lambda *one: told.append(one))
        assert late == []
        return table, subject

    table, subject = scanned(Table({"question": 1}))
    assert len(table.weights) == 4 * 4 and {row.weight for row in table.weights} == set(subject.products)
    for name in subject.orders:
        rows = table.of_group(name)
        assert rows[0].kept == rows[0].channels and rows[0].error == 0 and len(rows) <= len(SHARES) + 1
        assert rows[-1].error > 0
    for name in subject.products:
        at = {(row.sparsity, row.bits): row.error for row in table.of_weight(name)}
        assert at[0.0, 8] < at[0.0, 3] and at[0.0, 8] < at[0.9, 8]
    assert len(kept) == len(subject.products) + len(subject.orders) == told[-1][0] == told[-1][1]
    half = kept[len(kept) // 2]
    kept.clear()
    again, _ = scanned(half)
    assert len(kept) < len(told)
    for one, other in zip(sorted(table.weights, key=str), sorted(again.weights, key=str), strict=True):
        assert one.error == pytest.approx(other.error, rel=1e-4, abs=1e-9)


@pytest.mark.one_backend
def test_few_channels_and_most_zeros_are_measured_where_a_step_before_hardly_changes_the_outputs():
    model = network()
    kernel, head = (model.get_layer(name).kernel for name in ("hidden", "head"))
    # One of the units, and few entries, make most of the outputs.
    value = np.where(np.arange(16) == 3, 1.0, 1e-3) * np.array(keras.ops.convert_to_numpy(kernel))
    kernel.assign(np.where(np.arange(len(value))[:, None] % 150 == 0, 30.0, 1e-3) * value)
    head.assign(np.array(keras.ops.convert_to_numpy(head)) * np.where(np.arange(16) == 3, 5.0, 0.05)[:, None])
    subject = SearchedModel(model, FITTED, FLOATS)
    levels = Levels(tuple(Level(zeros, 8) for zeros in (0.0, 0.95, 0.98, 0.99)))
    table, _ = scan(subject, lambda: walk(model, subject), levels, Table(), lambda _: None)
    left = {name: [(row.kept / row.channels, row.error) for row in table.of_group(name)] for name in subject.orders}
    left |= {name: [(1 - row.sparsity, row.error) for row in table.of_weight(name)] for name in subject.products}
    assert left["hidden"][-1][0] == 1 / 16 and left["hidden/kernel"][-1][0] == pytest.approx(0.01)
    for name, found in left.items():
        last = 0.25 if name in subject.orders else 0.05
        slight = [error <= 0.02 for share, error in found if share <= last + 1e-9]
        # Each step after the last one of all follows one of a small error, and the last one has a larger one.
        assert all(slight[:-1]) and (not slight[-1] or name in ("hidden", "hidden/kernel"))
    assert any(len(found) == 2 for found in left.values())


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
    words = RNG.integers(0, 500, (96, 12)).astype("int32")
    subject = SearchedModel(model, words, QuantizationOptions())
    rows = [WeightRow("table/embeddings", 0.0, bits, 0.0, 1 / bits, (float(bits),)) for bits in (8, 4)]
    costs = Costs(subject, Table({}, tuple(rows)), packed=packed)
    found = {bits: costs.least("bytes", {"error": 1.01 / bits}).costs["bytes"] for bits in (8, 4)}
    assert {one.bits for one in costs.least("bytes", {"error": 0.26}).levels.values()} == {8, least}
    assert found[8] - found[4] == (500 * 16 * 4 / 8 - 500 * 4 if packed else 0)


def test_changes_after_which_outputs_are_not_finite_are_no_rows():
    model = network()
    subject = SearchedModel(model, FITTED, FLOATS)
    levels = Levels((Level(0.0, 8), Level(0.0, 4)))

    class Overflowing(RepairedScan):
        def error(self, values, masks=None):
            found = super().error(values, masks)
            return found if found < 1e-3 else math.inf

    def measure():
        products = list(subject.products.values())
        return Overflowing(model, batched(FITTED, 32), batched(MEASURED, 48), products, 1e9, subject.written)

    table, _ = scan(subject, measure, levels, Table(), lambda _: None)
    assert {row.bits for row in table.weights} == {8}
    assert all(math.isfinite(row.error) for row in (*table.weights, *table.removals))
    assert all(table.of_group(name) for name in subject.orders)
    assert from_plain(Table, table.to_dict()) == table
    kernel = model.get_layer("head").kernel
    kernel.assign(np.full(kernel.shape, np.inf))
    with pytest.raises(ValueError, match="whose outputs are not all finite on these examples. Look for"):
        walk(model, subject)


@pytest.mark.one_backend
def test_a_small_weight_keeps_an_entry_for_each_channel_that_is_left():
    inputs = keras.Input((2,))
    model = keras.Sequential([inputs, L.Dense(1, name="head"), L.Dense(40, name="wide"), L.Dense(30, name="large")])
    found = {one.name: one for one in weights_of(model)}
    # One of 16 entries was left, and one of 2 is; two of 16 were, and both are.
    assert _sparsity(found["head/kernel"], 15 / 16, 16) == pytest.approx(0.5)
    assert _sparsity(found["head/kernel"], 0.5, 16) == 0
    # As many as there were.
    assert _sparsity(found["wide/kernel"], 0.9, 40) == pytest.approx(0.9)
    assert _sparsity(found["large/kernel"], 0.9, 2400) == pytest.approx(0.9)


@pytest.mark.thorough
def test_a_quantized_model_is_refused_at_once():
    model = network()
    quantize_model(model, QuantizationOptions(), FITTED)
    with pytest.raises(ValueError, match="A search gives weights .* Search the model as it was before"):
        SearchedModel(model, FITTED, FLOATS)


@pytest.mark.thorough
def test_a_model_without_removable_channels_has_weights_to_choose():
    subject = SearchedModel(
        keras.Sequential([keras.Input((6,)), L.Dense(3, name="head")]), FITTED[:, 0, :3, 0].repeat(2, 1), FLOATS
    )
    assert subject.orders == {} and set(subject.products) == {"head/kernel"}


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.25, 1.0, 4.0])
def test_the_table_tells_to_how_many_examples_memory_lets_layers_be_fitted(share):
    model = network()
    subject = SearchedModel(model, FITTED, FLOATS)
    memory = share * 2 * sum(subject.written) * len(FITTED)
    inputs = ScanInputs(model, FITTED, MEASURED, Levels(()), memory, FLOATS)
    assert inputs.examples(subject) == min(24 * 4 * share, 96)


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


def test_weights_inside_an_attention_are_measured_as_gptq_rounds_them():
    keras.utils.set_random_seed(6)
    inputs = keras.Input((6, 16))
    x = L.MultiHeadAttention(2, 8, name="attention")(inputs, inputs)
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    signals = FITTED.reshape(96, 8, 16)[:, :6]
    subject = SearchedModel(model, signals, FLOATS)
    names = [f"attention/{name}/kernel" for name in ("query", "key", "value", "attention_output")]
    assert set(subject.products) == {*names, "head/kernel"} and not set(names) & set(subject.layouts)
    work = walk(model, subject, signals, signals)
    levels = Levels((Level(0.0, 8), Level(0.0, 3)))
    table, _ = scan(subject, lambda: work, levels, Table(), lambda _: None)
    assert {row.weight for row in table.weights} == set(subject.products)
    for name in names:
        errors = {row.bits: row.error for row in table.of_weight(name)}
        assert 0 < errors[8] < 0.01 * errors[3]
    # What the quantization of this weight alone computes.
    product = subject.products[names[0]]
    work = RepairedScan(model, batched(signals, 32), batched(signals, 48), [], 1e9, subject.written)
    grid = functools.partial(subject.grid_of, product.target)
    (one,) = candidates(levels_of(work, product), [Level(0.0, 3)], grid)
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    options = QuantizationOptions(bits=3, activation_bits="float", method="gptq", include=names[0])
    quantize_model(copy, options, signals)
    found = keras.ops.convert_to_numpy(copy.get_layer("attention").query_dense.kernel)
    np.testing.assert_allclose(found, one.values[0][1], atol=1e-6)


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
