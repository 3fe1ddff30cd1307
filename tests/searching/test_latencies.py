"""Latencies of layers: one file for each width, and what a mixture of them takes."""

import keras
import numpy as np
import pytest
from keras import layers as L

from prunekit.delivery.litert.latency import Latencies
from prunekit.searching import latencies
from prunekit.searching.costs import Costs
from prunekit.searching.latencies import FileClock, LayerSeconds, by_weight, layer_axes, layer_latencies, seconds_of
from prunekit.searching.searched_model import SearchedModel
from prunekit.searching.table import RemovalRow, Table, WeightRow
from prunekit.searching.time_limit import TimeLimit
from prunekit.techniques.factorize.forms import Structure

IMAGES = np.random.default_rng(0).normal(size=(40, 12, 12, 3)).astype("float32")


def network():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12, 12, 3))
    x = L.Conv2D(8, 3, padding="same", activation="relu", name="first")(inputs)
    x = L.DepthwiseConv2D(3, padding="same", name="depthwise")(x)
    x = L.Conv2D(8, 3, padding="same", activation="relu", name="second")(x)
    x = L.Conv2D(8, 3, padding="same", activation="relu", name="third")(x)
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(4, name="head")(x))


@pytest.fixture(scope="module")
def subject():
    return SearchedModel(network(), IMAGES)


def table(subject):
    weights = tuple(
        WeightRow(name, 0.0, bits, 0.0, 0.1 / bits, (float(bits),)) for name in subject.products for bits in (8, 4)
    )
    rows = [
        RemovalRow(name, one.total, kept, 0.1 * (one.total - kept))
        for name, one in subject.orders.items()
        for kept in (8, 6, 3)
    ]
    return Table({}, weights, tuple(rows))


def test_four_points_say_what_is_between_them():
    draw = np.random.default_rng(1)
    constant, inputs, outputs, both = draw.uniform(0.1, 1, 4)

    def seconds(u, v):
        return constant + inputs * u + outputs * v + both * u * v

    points = [(u, v, seconds(u, v)) for u in (1.0, 0.5) for v in (1.0, 0.47)]
    np.testing.assert_allclose(latencies._bilinear(points), (constant, inputs, outputs, both))
    found = latencies._bilinear([(1.0, 1.0, 3.0), (0.5, 1.0, 2.0)])
    np.testing.assert_allclose(found, (1, 2, 0, 0), atol=1e-12)
    # Of a layer that is measured whole, the time is that of its products.
    assert latencies._bilinear([(1.0, 1.0, 3.0)]) == (0, 0, 0, 3)


def test_the_seconds_of_a_mixture_are_those_of_its_layers(subject):
    draw = np.random.default_rng(2)
    rows = [LayerSeconds(name, bits, *draw.uniform(0.1, 1, 4)) for name in subject.products for bits in (8, 4)]
    costs = Costs(subject, table(subject), packed=False, latencies=by_weight(rows))
    known = {(row.weight, row.bits): row for row in rows}
    kept_by = {"first": "first", "depthwise": "first", "second": "second", "third": "third", "head": None}
    before = {"first": None, "depthwise": "first", "second": "first", "third": "second", "head": "third"}
    for goal, bound in (("bytes", 0.5), ("latency", 0.7), ("balanced", 2.0)):
        mixture = costs.least(goal, {"error": bound})
        expected = 0.0
        for name, level in mixture.levels.items():
            row, layer = known[name, level.bits], name.split("/")[0]
            axes = layer_axes(subject.products[name].target)
            u, v = (1.0 if group is None else mixture.kept[group] / 8 for group in (before[layer], kept_by[layer]))
            v = v if axes[1] else 1.0
            expected += row.constant + row.inputs * u + row.outputs * v + row.both * u * v
        assert mixture.costs["latency"] == pytest.approx(expected)
        assert mixture.error <= bound
    whole = [row.constant + row.inputs + row.outputs + row.both for row in rows if row.bits == 8]
    assert costs.whole["latency"] == pytest.approx(sum(whole))


@pytest.mark.thorough
def test_the_seconds_of_a_rank_lie_between_those_that_were_measured():
    rows = [LayerSeconds("kernel", 8, 9.0, 9.0, 9.0, 9.0)]
    rows += [LayerSeconds("kernel", 8, 1.0, float(rank), 2.0 * rank, 0.0, "pair", rank) for rank in (4, 20)]
    found = seconds_of(rows, 6, Structure("pair", (10,)))
    assert (found.constant, found.inputs, found.outputs, found.both) == pytest.approx((1, 10, 20, 0))
    assert seconds_of(rows, 8, None) == rows[0] and seconds_of(rows[:2], 8, Structure("pair", (7,))).inputs == 4


@pytest.mark.thorough
def test_the_least_latency_is_below_that_of_the_fewest_bytes(subject):
    rows = [
        LayerSeconds(name, bits, 0.0, 0.0, 0.0, 1.0 if bits == 8 else 3.0)
        for name in subject.products
        for bits in (8, 4)
    ]
    costs = Costs(subject, table(subject), packed=False, latencies=by_weight(rows))
    small, fast = (costs.least(name, {"error": 0.5}) for name in ("bytes", "latency"))
    assert {level.bits for level in small.levels.values()} >= {4} and {one.bits for one in fast.levels.values()} == {8}
    assert fast.costs["latency"] < small.costs["latency"] and fast.costs["bytes"] > small.costs["bytes"]
    bounded = costs.least("bytes", {"error": 0.5, "latency": 1.2 * fast.costs["latency"]})
    assert fast.costs["bytes"] >= bounded.costs["bytes"] >= small.costs["bytes"]


def test_each_layer_is_measured_at_its_widths_and_equal_ones_once(subject, monkeypatch):
    measured = latencies.measured_latencies
    files = []

    def counted(paths, *arguments):
        files.extend(path.read_bytes() for path in paths)
        return measured(paths, *arguments)

    monkeypatch.setattr(latencies, "measured_latencies", counted)
    told = []
    low_rank = {"third/kernel": [Structure("separable", (rank,)) for rank in (2, 6)]}
    found, late = layer_latencies(subject, (8, 4), lambda *one: told.append(one), low_rank)
    assert late == []
    rows = [row for row in found if not row.form]
    assert {(row.weight, row.bits) for row in rows} == {(name, bits) for name in subject.products for bits in (8, 4)}
    assert [(row.weight, row.form, row.rank, row.bits) for row in found if row.form] == [
        ("third/kernel", "separable", rank, bits) for rank in (2, 6) for bits in (8, 4)
    ]
    whole = {(row.weight, row.bits): row.constant + row.inputs + row.outputs + row.both for row in rows}
    assert min(whole.values()) > 0
    # "second" and "third" are equal; the depthwise layer has two widths, others four, and two layers of a rank three.
    assert len(files) == 2 * (4 + 2 + 4 + 4 + 2 * 3) == told[-1][0] == told[-1][1]
    assert whole["second/kernel", 8] == whole["third/kernel", 8]
    assert whole["second/kernel", 8] > whole["head/kernel", 8]
    assert len(files[0]) > 0 and all(b"TFL3" in one[:8] for one in files)


@pytest.mark.thorough
def test_after_the_limit_the_layer_that_multiplies_most_is_measured(subject):
    found, late = layer_latencies(subject, (8, 4), lambda *one: None, limit=TimeLimit.after(0))
    # "third" is equal to "second".
    assert {row.weight for row in found} == {"second/kernel", "third/kernel"}
    assert late == ["first/kernel", "depthwise/kernel", "head/kernel"]


def test_a_clock_takes_the_share_of_turns_with_the_file_in_float32(monkeypatch):
    model = network()
    assert FileClock(model, IMAGES).whole > 0

    def measured(paths, inputs, *_):
        # Each turn on a machine of another speed.
        assert [set(one) for one in inputs] == [set(inputs[0])] * len(paths)
        return Latencies(np.outer(np.arange(1.0, 8.0), [path.stat().st_size for path in paths]))

    monkeypatch.setattr(latencies, "measured_latencies", measured)
    clock = FileClock(model, IMAGES)
    assert clock.whole == 4 * len(clock._file)
    assert clock.seconds(bytes(1000)) == pytest.approx(4 * 1000)
