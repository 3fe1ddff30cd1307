"""The scan: layers that read a change are fitted, and the model is as it was; values of weights at each level."""

import functools
import math

import keras
import numpy as np
import pytest
from keras import layers as L
from networks import outputs
from searched_models import FITTED, FLOATS, MEASURED, network, walk

from prunekit.anatomy.records.plain_data import from_plain
from prunekit.core.layerwise.layerwise import LayerwiseRepair
from prunekit.core.outputs.output_error import output_error
from prunekit.core.runtime.variable_values import replaced
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
from prunekit.searching.judge import batched
from prunekit.searching.repaired_scan import RepairedScan, ridge
from prunekit.searching.searched_model import SearchedModel
from prunekit.searching.shared_scan import ScanInputs
from prunekit.searching.table import SHARES, Levels, Table, scan
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.factorize.factorizing import with_structures
from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.shrink.channels.options import KeptChannels, ShrinkOptions
from prunekit.techniques.shrink.channels.shrinking import remove_channels

pytestmark = pytest.mark.every_backend


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
        work = RepairedScan(model, batches, batched(MEASURED, 48), products, memory, subject.activation_bytes)
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

    layer = levels_of(work, product)
    for level in levels:
        (one,) = candidates(layer, [level], grid_of)
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
        return Overflowing(model, batched(FITTED, 32), batched(MEASURED, 48), products, 1e9, subject.activation_bytes)

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
    memory = share * 2 * sum(subject.activation_bytes) * len(FITTED)
    inputs = ScanInputs(model, FITTED, MEASURED, Levels(()), memory, FLOATS)
    assert inputs.examples(subject) == min(24 * 4 * share, 96)


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
    work = RepairedScan(model, batched(signals, 32), batched(signals, 48), [], 1e9, subject.activation_bytes)
    grid = functools.partial(subject.grid_of, product.target)
    (one,) = candidates(levels_of(work, product), [Level(0.0, 3)], grid)
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    options = QuantizationOptions(bits=3, activation_bits="float", method="gptq", include=names[0])
    quantize_model(copy, options, signals)
    found = keras.ops.convert_to_numpy(copy.get_layer("attention").query_dense.kernel)
    np.testing.assert_allclose(found, one.values[0][1], atol=1e-6)
