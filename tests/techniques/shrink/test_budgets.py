"""Targets that are measured, bytes and latency: the search, what is refused, files, the report."""

import json
import sys

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, randomize
from keras import layers
from removed_channels import small_cnn

import prunekit as pk
from prunekit.delivery.litert import model_measures
from prunekit.delivery.litert.isolated_run import ScriptFailed
from prunekit.delivery.litert.latency import Latencies
from prunekit.delivery.litert.litert import ConversionError
from prunekit.techniques.shrink.channels.measured_size import Measure, Measured
from prunekit.techniques.shrink.channels.options import ShrinkOptions, SizeTarget
from prunekit.techniques.shrink.channels.shrinking import remove_channels


def cnn(width=24):
    keras.utils.set_random_seed(3)
    return randomize(small_cnn(width))


def units(model):
    return sum(layer.output.shape[-1] for layer in model.layers if layer.weights)


# ---- the search, by measures that stand for files --------------------------------------------------------------------


class Sizes:
    """A measure by a function of the smaller model; remembers what it measured."""

    def __init__(self, size, noise=0.0, follows="parameters"):
        self.seen, self._size, self._noise = [], size, noise
        self.measure = Measure(follows, self._compare)

    def _compare(self, smaller):
        share = self._size(smaller)
        self.seen.append(share)
        return Measured("bytes", 100.0, 100 * share, "bytes", share, (share - self._noise, share + self._noise), "test")


def search(sizes, share, *, name="bytes", model=None, data=None, progress=None, **options):
    given = model or cnn()
    # A repair measures the files once more.
    options.setdefault("repair", "none" if data is None else None)
    return remove_channels(
        given, SizeTarget(name, share), ShrinkOptions(**options), data, measure=sizes.measure, progress=progress
    )


def of_parameters(overhead):
    """A file with a part that does not shrink."""
    whole = cnn().count_params()
    return lambda model: (overhead + model.count_params() / whole) / (overhead + 1)


@pytest.mark.every_backend
@pytest.mark.parametrize("follows", ["parameters", "macs"])
@pytest.mark.parametrize(("overhead", "share", "most"), [(0.0, 0.5, 1), (0.3, 0.5, 3), (2.0, 0.8, 3), (0.05, 0.1, 3)])
def test_a_size_that_follows_the_parameters_is_reached_with_few_models(overhead, share, most, follows):
    sizes = Sizes(of_parameters(overhead), follows=follows)
    found = search(sizes, share)
    measured = found.report.measured
    assert abs(measured.share - share) <= 0.02 * share
    assert measured.models == len(sizes.seen) <= most + (follows == "macs")
    assert measured.share == of_parameters(overhead)(found.model)
    assert not found.report.notes


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_convex_size_is_reached(share):
    model = cnn(96)
    sizes = Sizes(lambda smaller: (smaller.count_params() / model.count_params()) ** 4)
    assert abs(search(sizes, share, model=model).report.measured.share - share) <= 0.02 * share
    assert len(sizes.seen) <= 7


def test_a_size_that_does_not_fall_evenly_ends_at_the_nearest_with_a_note():
    """Kernels work on multiples of eight channels, and a width in between costs more than the next multiple."""

    def stepped(model):
        width = model.get_layer("two").filters
        return (-(-width // 8) * 8 + 4 * (width % 8 > 0)) / 36

    sizes = Sizes(stepped, noise=0.001, follows="macs")
    found = search(sizes, 0.6, name="latency")
    assert len(sizes.seen) <= 7
    assert found.report.measured.share == min(sizes.seen, key=lambda share: abs(share - 0.6))
    assert [note for note in found.report.notes if "latency=0.6 is not reached within 2%" in note]


def test_noise_above_the_tolerance_is_said_once_and_ends_the_search():
    draw = np.random.default_rng(0)
    whole = cnn().count_params()
    sizes = Sizes(lambda model: model.count_params() / whole + draw.normal(0, 0.1), noise=0.2, follows="macs")
    found = search(sizes, 0.5, name="latency")
    assert len(sizes.seen) <= 7
    (note,) = found.report.notes
    low, high = found.report.measured.interval
    assert f"varies too much on this machine to tell 2%: between {low:.3f} and {high:.3f}" in note
    assert "\n" not in note


def test_a_target_below_the_smallest_model_is_refused_with_the_measured_range():
    sizes = Sizes(of_parameters(1.0))
    with pytest.raises(ValueError, match=r"^bytes=0.4 cannot be reached within 10%.*\(test\).*range is 0.50\d to 1"):
        search(sizes, 0.4)
    assert len(sizes.seen) == 2
    noisy = Sizes(of_parameters(1.0), noise=0.01)
    with pytest.raises(ValueError, match=r"latency=0.4 cannot be reached"):
        search(noisy, 0.4, name="latency")


def test_an_exact_size_that_jumps_over_the_target_is_refused_and_a_multiple_may_jump():
    def jump(model):
        return 0.3 if units(model) < 70 else 1.0

    with pytest.raises(ValueError, match=r"bytes=0.6 cannot be reached.*range is 0.300 to 1"):
        search(Sizes(jump), 0.6)
    assert search(Sizes(jump), 0.6, multiple=8).report.measured.share == 0.3
    report = search(Sizes(jump), 0.6, tolerance=None).report
    assert report.measured.share == 0.3 and "bytes=0.6 is not reached within 2%" in report.notes[0]


def test_a_share_of_one_removes_nothing():
    found = search(Sizes(of_parameters(0.1)), 1.0)
    assert not found.removed.size and found.report.measured.share == 1.0


def test_the_returned_model_is_measured_after_the_repair_and_progress_is_told():
    told, seen = [], []

    def size(model):
        seen.append(model)
        return of_parameters(0.0)(model)

    data = np.random.default_rng(0).normal(size=(64, 12, 12, 3)).astype("float32")
    found = search(Sizes(size), 0.5, data=data, progress=lambda *event: told.append(event))
    assert seen[-1] is found.model and len(seen) == 2
    assert told[:2] == [(0, 7, "measuring bytes"), (1, 7, f"measured {found.report.measured.share:.3f} of the bytes")]
    assert told[-1][2].startswith("repaired ") and told[-1][0] == told[-1][1]


# ---- files -----------------------------------------------------------------------------------------------------------

tensorflow_only = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs a converter")


@tensorflow_only
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_bytes_are_those_of_the_exported_file(tmp_path, share):
    model, samples = cnn(), np.zeros((4, 12, 12, 3), "float32")
    smaller, report = pk.shrink(model, bytes=share)
    whole, part = (pk.export(one, tmp_path, samples, ["litert"], name=one.name)[0].bytes for one in (model, smaller))
    measured = report.measured
    assert (measured.before, measured.after) == (whole, part)
    assert abs(part / whole - share) <= 0.02 * share and measured.share == part / whole
    assert f"{part:,} of {whole:,} bytes ({part / whole:.3f}) are left." in report.verdict()
    section = next(one for one in report.sections() if one.title == "Measured size")
    assert section.rows[0][2:4] == (whole, part) and section.explanation.startswith("LiteRT file in float32")
    assert json.loads(json.dumps(report.to_dict()))["measured"]["after"] == part


@tensorflow_only
def test_bytes_out_of_reach_are_refused_with_the_range_of_files():
    with pytest.raises(ValueError, match=r"bytes=0.01 cannot.*LiteRT file in float32.*range is 0.\d+ to 1") as caught:
        pk.shrink(cnn(), bytes=0.01)
    assert "\n" not in str(caught.value)


@tensorflow_only
def test_latency_is_measured_on_files_that_ran():
    # Nearly any share is near enough, so that a busy machine measures few models.
    _, report = pk.shrink(cnn(), latency=0.5, tolerance=0.99)
    measured = report.measured
    assert measured.name == "latency" and measured.unit == "ms" and measured.models >= 1
    assert measured.before > 0 and measured.after > 0
    assert measured.interval[0] <= measured.share <= measured.interval[1]
    assert "batch of 1, one thread, ai-edge-litert" in measured.setting and "turns of both files" in measured.setting
    section = next(one for one in report.sections() if one.title == "Measured size")
    assert [column.name for column in section.columns[-3:]] == ["left", "from", "to"]
    assert "ms of latency" in report.verdict()


class Ran:
    """Stands for the measurement: the bytes of a file are its duration; remembers the inputs."""

    def __init__(self, monkeypatch):
        self.inputs = None
        monkeypatch.setattr(model_measures, "measured_latencies", self)

    def __call__(self, files, inputs, seconds, precision):
        self.inputs = inputs
        return Latencies(np.array([[path.stat().st_size for path in files]] * 15, float))


@tensorflow_only
def test_inputs_of_open_size_are_given_and_integers_are_ones(monkeypatch):
    ran = Ran(monkeypatch)
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = layers.Dense(32, activation="relu", name="hidden")(layers.Embedding(50, 16, name="table")(tokens))
    model = keras.Model(tokens, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))
    with pytest.raises(ValueError, match="no fixed size"):
        pk.shrink(model, latency=0.6)
    _, report = pk.shrink(model, latency=0.6, inputs=(1, 9), repair="none")
    assert abs(report.measured.share - 0.6) <= 0.012
    for named in ran.inputs:
        given = named["tokens"]
        assert given.shape == (1, 9) and given.dtype == "int32" and (given == 1).all()
    # The size of a file does not depend on the length.
    assert pk.shrink(model, bytes=0.6)[1].measured.after > 0


@tensorflow_only
@pytest.mark.parametrize("name", ["two_towers", "subclassed"])
def test_several_inputs_and_models_without_declared_inputs(monkeypatch, name):
    ran = Ran(monkeypatch)
    if name == "subclassed":

        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.first, self.second = layers.Dense(64, activation="relu"), layers.Dense(4)

            def call(self, x):
                return self.second(self.first(x))

        model = Net()
        model(np.zeros((2, 16), "float32"))
    else:
        model = ARCHITECTURES[name]()
    _, report = pk.shrink(model, latency=0.7, repair="none")
    assert abs(report.measured.share - 0.7) <= 0.014
    assert len(ran.inputs) == 2 and all(ran.inputs)


# ---- where nothing can be measured -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["bytes", "latency"])
def test_without_litert_a_measured_target_is_refused_in_one_line(monkeypatch, target):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    with monkeypatch.context() as patch:
        patch.setattr(keras.backend, "backend", lambda: "jax")
        with pytest.raises(ValueError, match=rf"{target} is measured on LiteRT.*'jax'.*`parameters` or `macs`") as one:
            pk.shrink(model, **{target: 0.5})
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    with pytest.raises(ValueError, match="need ai-edge-litert.*pip install ai-edge-litert") as other:
        pk.shrink(model, **{target: 0.5})
    assert "\n" not in str(one.value) + str(other.value)


@tensorflow_only
def test_a_model_that_has_no_file_or_does_not_run_is_refused_in_one_line(monkeypatch):
    def stop(*arguments):
        raise ScriptFailed("crashes the LiteRT interpreter (SIGSEGV)")

    monkeypatch.setattr(model_measures, "measured_latencies", stop)
    with pytest.raises(ValueError, match=r"latency of .* cannot be measured: .*SIGSEGV.*Use `macs`"):
        pk.shrink(cnn(), latency=0.5)

    def fail(*arguments):
        raise ConversionError("failed to legalize operation")

    monkeypatch.setattr(model_measures, "plain_file", fail)
    with pytest.raises(ValueError, match="has no LiteRT file: failed to legalize operation. Use `parameters`"):
        pk.shrink(cnn(), bytes=0.5)
