"""pk.search with bounds of time and of memory for activations, and for microcontrollers."""

import functools
import json
from dataclasses import replace

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from keras import layers as L

import prunekit as pk
from prunekit.delivery.litert.arena import arena_bytes
from prunekit.searching import search_run
from prunekit.searching.building import FORMS, build
from prunekit.searching.judge import SearchData
from prunekit.searching.latencies import LayerSeconds
from prunekit.searching.search_run import TABLES

# ---- latency ---------------------------------------------------------------------------------------------------------


def wide():
    """A network whose calls take long enough to be told apart."""
    keras.utils.set_random_seed(3)
    conv = functools.partial(L.Conv2D, kernel_size=3, padding="same", activation="relu")
    layers = [conv(32, name="first"), conv(64, name="second"), L.GlobalAveragePooling2D(), L.Dense(4, name="logits")]
    return keras.Sequential([keras.Input((20, 20, 3)), *layers])


class Clock:
    """A machine on which a call takes a nanosecond for each byte of the file, and ten for those in float32."""

    whole = 1e-3

    def __init__(self, model, inputs):
        pass

    def seconds(self, content):
        return 1e-9 * len(content)


def layers_of(subject, bits, progress, structures, limit):
    """Seconds of layers: a nanosecond for each byte of a kernel; those of 4 bits take twice as long."""
    progress(1, 1, "a file of one layer")
    return [
        LayerSeconds(name, width, 0.0, 0.0, 0.0, 1e-9 * product.target.size * (1 if width == 8 else 2), *one)
        for name, product in subject.products.items()
        for width in bits
        for one in [(), *((found.form, found.ranks[0]) for found in structures.get(name, ()))]
    ], []


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(search_run, "FileClock", Clock)
    monkeypatch.setattr(search_run, "layer_latencies", layers_of)


def test_latency_is_a_bound_and_a_goal(machine, tmp_path):
    model = wide()
    images = np.random.default_rng(0).normal(size=(300, 20, 20, 3)).astype("float32")
    fast = pk.search(model, images, drop=0.4, profile="fast", output=tmp_path).report
    assert fast.drop <= 0.4 and fast.seconds == 1e-9 * fast.bytes
    assert {row.bits for row in fast.weights} == {8}
    assert all(point.seconds > 0 and point.counted_seconds > 0 for point in fast.points)
    rows = json.loads((tmp_path / TABLES["litert"]).read_text())["latencies"]
    assert {(row["weight"], row["bits"]) for row in rows} >= {("second/kernel", 8), ("second/kernel", 4)}
    # Layers of low rank are timed where they may be chosen.
    pk.search(model, images, drop=0.4, profile="fast", output=tmp_path, techniques="shrink")
    assert json.loads((tmp_path / TABLES["litert"]).read_text())["latencies"] == rows
    told = []
    within = pk.search(model, images, latency="15us", output=tmp_path, progress=lambda *one: told.append(one[2])).report
    assert within.seconds <= within.asked_seconds == pytest.approx(15e-6)
    assert not any("layer" in text for text in told)
    assert "Call" in str(within) and "times faster" in within.verdict()
    slower = replace(within, seconds_before=1e-9)
    assert "times slower" in slower.verdict() and "has slower kernels for these integers" in str(slower)
    share = pk.search(model, images, latency=0.015, output=tmp_path).report
    assert share.asked_seconds == pytest.approx(15e-6) and share.bytes == within.bytes
    small = pk.search(model, images, drop=0.4, output=tmp_path).report
    assert small.seconds is None and small.profile == "small" and small.bytes <= fast.bytes


def test_a_latency_out_of_reach_is_answered_with_the_least(machine):
    model = wide()
    images = np.random.default_rng(0).normal(size=(200, 20, 20, 3)).astype("float32")
    with pytest.raises(
        ValueError, match=r"No file meets all bounds without training. Received: latency=.* bytes and .* [µm]s"
    ):
        pk.search(model, images, latency="1us")


# ---- microcontrollers ------------------------------------------------------------------------------------------------


def test_the_arena_is_a_bound_and_everything_is_integers(tmp_path):
    model = wide()
    images = np.random.default_rng(0).normal(size=(300, 20, 20, 3)).astype("float32")
    found = pk.search(model, images, drop=0.8, arena="24kB", target="microcontroller", output=tmp_path)
    report = found.report
    assert report.arena == arena_bytes(found.file) <= 24_000 == report.asked_arena
    # Both convolutions in the whole network: 20 x 20 x (32 + 64).
    assert all(one.arena is not None and one.arena <= 38_400 for one in report.points)
    assert "24,000" in str(report) or "24.0 kB" in str(report)
    kept = {one.name: one.kept for one in report.groups}
    assert 400 * (kept["first"] + kept["second"]) <= 24_000
    interpreter = Interpreter(model_content=found.file)
    ends = [*interpreter.get_input_details(), *interpreter.get_output_details()]
    assert [one["dtype"] for one in ends] == [np.int8, np.int8]
    with pytest.raises(ValueError, match=r"No file meets all bounds. Received: .*arena=2,000; the least .* of arena"):
        pk.search(model, images, drop=0.8, arena=2000, target="microcontroller", output=tmp_path)
    alone = pk.search(model, images, arena="24kB", target="microcontroller", output=tmp_path).report
    assert alone.arena <= 24_000 and alone.drop <= report.drop


def depthwise(inputs):
    x = L.DepthwiseConv2D(3, padding="same", activation="relu")(L.Conv2D(32, 1, activation="relu")(inputs))
    return L.SeparableConv2D(24, 3, padding="same", activation="relu")(x)


def low_rank_convolution(inputs):
    x = L.Conv2D(32, 3, padding="same", activation="relu")(inputs)
    x = L.Conv2D(32, 3, padding="same", activation="relu", name="wide")(x)
    return L.Conv2D(8, 3, padding="same", activation="relu")(x)


@pytest.mark.parametrize(("body", "techniques"), [(depthwise, "shrink"), (low_rank_convolution, "factorize")])
def test_the_counted_arena_is_that_of_the_file(body, techniques):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12, 12, 3))
    model = keras.Model(inputs, L.Dense(4)(L.GlobalAveragePooling2D()(body(inputs))))
    if techniques == "factorize":
        kernel = model.get_layer("wide").kernel
        draw = np.random.default_rng(1)
        kernel.assign(0.1 * draw.normal(size=(3, 3, 32, 2)) @ draw.normal(size=(2, 32)))
    images = np.random.default_rng(0).normal(size=(200, 12, 12, 3)).astype("float32")
    data = SearchData(images, 0)
    run = search_run.SearchRun(model, data, "microcontroller", (techniques,), 1e9, None)
    run.scan(run.question(0.9, None, None, "small", 10**9))
    costs = run._costs_of((techniques,))
    low, high = costs.errors
    counted = set()
    for error in np.geomspace(max(low, 1e-6) * 1.01, high, 3):
        mixture = costs.least("arena", {"error": float(error)})
        file = build(run._subject, mixture, data.fitted, data.held_out[:64], FORMS["microcontroller"], memory=1e9).file
        # Kept channels are whole numbers, and tensors are aligned to 16 bytes.
        assert arena_bytes(file) == pytest.approx(mixture.costs["arena"], rel=0.05)
        counted.add(mixture.costs["arena"])
    assert len(counted) > 1


@pytest.mark.thorough
def test_a_model_whose_arena_is_not_counted_is_measured():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 16))
    x = L.MultiHeadAttention(2, 8, name="attention")(inputs, inputs)
    # A layer with the name of one inside the attention.
    model = keras.Model(inputs, L.GlobalAveragePooling1D()(L.Dense(12, name="query")(x)))
    signals = np.random.default_rng(0).normal(size=(200, 8, 16)).astype("float32")
    report = pk.search(model, signals, drop=0.9, arena="200kB").report
    assert 0 < report.arena <= 200_000
    inner = keras.Model(inputs, L.GlobalAveragePooling1D()(x))
    with pytest.raises(ValueError, match=r"No file meets all bounds without training. Received: arena=64; the nearest"):
        pk.search(inner, signals, arena=64)


@pytest.mark.thorough
def test_tables_of_full_integers_have_8_bits():
    keras.utils.set_random_seed(0)
    layers = [L.Embedding(60, 16, name="table"), L.GlobalAveragePooling1D(), L.Dense(24, activation="relu"), L.Dense(4)]
    model = keras.Sequential([keras.Input((10,), dtype="int32"), *layers])
    words = np.random.default_rng(0).integers(0, 60, (200, 10)).astype("int32")
    # The smallest of all is made, and has the table in 8 bits: one of 4 bits is no integer of the file.
    with pytest.raises(
        ValueError, match=r"No file meets all bounds without training. Received: bytes=1,000; the nearest"
    ):
        pk.search(model, words, bytes="1kB", target="microcontroller", techniques="quantize")
