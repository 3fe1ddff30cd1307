"""`inspect --groups`, and the commands that write a smaller model: prune, shrink, simplify, remove-blocks."""

import json
from pathlib import Path

import pytest
from command_lines import assert_mistake
from networks import dense_network

from prunekit.sparsity import shorthands


class TestInspectGroups:
    def test_groups_and_what_stays_are_shown(self, run, stored):
        code, out, err = run("inspect", "--groups", stored)
        assert (code, err) == (0, "")
        lines = out.splitlines()
        row = next(line for line in lines if line.startswith("hidden"))
        assert row.split(maxsplit=3) == ["hidden", "8", "3", "hidden/kernel (1), out/kernel (0)"]
        assert any(line.startswith("outputs") and "an output of the model" in line for line in lines)

    def test_json_has_the_same(self, run, stored):
        found = json.loads(run("inspect", "--groups", stored, "--json")[1])
        assert [(group["name"], group["channels"]) for group in found["groups"]] == [("hidden", 8)]
        assert found["skipped"][0]["layers"] == ["out"]

    def test_without_groups_it_says_so(self, run, tmp_path):
        import keras

        keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]).save(tmp_path / "m.keras")
        code, out, _ = run("inspect", "--groups", "m.keras")
        assert code == 0 and "Groups of channels: No channels can be removed." in out

    def test_a_mistake_is_one_line(self, run, stored, tmp_path):
        (tmp_path / "bad.keras").write_bytes(b"no model")
        assert_mistake(run("inspect", "--groups", "bad.keras"), "bad.keras")
        assert_mistake(run("inspect", "--groups", "gone.keras"), "gone.keras: no such file.")
        assert_mistake(run("inspect", "--groups", stored, "--input-shape", "1,8"), "Leave out --input-shape.")

    def test_a_model_that_cannot_be_followed_is_a_mistake(self, run):
        import keras

        @keras.saving.register_keras_serializable("prunekit_tests")
        class Branching(keras.Model):
            def __init__(self, **options):
                super().__init__(**options)
                self.inner = keras.layers.Dense(3)

            def call(self, x, training=False):
                return self.inner(keras.ops.relu(x) if training else x)

        model = Branching()
        model(keras.ops.zeros((2, 4)))
        model.save("branching.keras")
        assert_mistake(run("inspect", "--groups", "branching.keras"), "its `call` cannot be followed")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A small model in a file."""

    path = tmp_path_factory.mktemp("models") / "net.keras"
    model = dense_network(8, activation=None, seed=1, hidden=8, out=4)
    model.compile("adam", "mse")
    model.save(path)
    return path


class TestPrune:
    def test_a_model_is_pruned_into_a_new_file(self, run, stored, tmp_path):
        import keras

        before = stored.read_bytes()
        code, out, err = run("prune", stored, "--sparsity", "0.5", "-o", "new/net.keras", "--exclude", "out")
        assert code == 0 and err.startswith("note: ")
        assert "hidden/kernel *" in out
        assert out.endswith("Sparsity 0.5000 in 1 weights. Written to new/net.keras\n")
        assert stored.read_bytes() == before
        weights = keras.models.load_model("new/net.keras").get_weights()
        assert [int((weight == 0).sum()) for weight in weights[::2]] == [32, 0]
        assert [path.name for path in Path("new").iterdir()] == ["net.keras"]

    def test_options_are_those_of_python(self, run, stored):
        code, out, _ = run("prune", stored, "--sparsity", "0.5", "--pattern", "2:4", "-o", "new.keras", "--json")
        found = json.loads(out)
        assert code == 0 and found["path"] == "new.keras"
        assert found["report"]["weights"][0]["pattern"] == "2:4"

    def test_with_data_the_model_is_repaired_and_the_layer_errors_are_shown(self, run, stored):
        import numpy as np

        rng = np.random.default_rng(0)
        np.savez("d.npz", x_train=rng.normal(size=(80, 8)).astype("float32"), y_train=rng.normal(size=(80, 4)))
        options = ("--sparsity", "0.5", "--data", "d.npz", "--examples", "60", "-o", "new.keras")
        code, out, _ = run("prune", stored, *options, "--criterion", "sparsegpt", "--allocation", "layer_error")
        assert code == 0 and "Output errors" in out
        code, out, _ = run("prune", stored, *options, "--repair", "outputs", "--force", "--json")
        assert code == 0 and len(json.loads(out)["report"]["layer_errors"]) == 2

    def test_a_scan_shares_the_sparsity_between_weights(self, run, stored):
        import keras
        import numpy as np

        import prunekit as pk

        rng = np.random.default_rng(0)
        np.savez("d.npz", x=rng.normal(size=(40, 8)).astype("float32"), y=rng.normal(size=(40, 4)))
        assert run("sensitivity", stored, "--data", "d.npz", "--sparsity", "0.5,0.9", "-o", "scan")[0] == 0
        scan = "sensitivity:scan/sensitivity.json"
        code, _, err = run("prune", stored, "--sparsity", "0.8", "--allocation", scan, "-o", "new.keras")
        model = keras.saving.load_model(stored, compile=False)
        pk.prune(model, 0.8, allocation=pk.allocations.SensitivityAllocation("scan/sensitivity.json"))
        for one, other in zip(keras.saving.load_model("new.keras", compile=False).weights, model.weights, strict=True):
            np.testing.assert_array_equal(one, other, err)
        assert code == 0, err
        missing = run("prune", stored, "--sparsity", "0.8", "--allocation", "sensitivity", "-o", "other.keras")
        assert_mistake(missing, "Expected the file of a scan (sensitivity.json, written by prunekit sensitivity)")

    def test_an_interrupted_scan_says_that_it_continues(self, run, stored, monkeypatch):
        def interrupted(*_, **__):
            raise KeyboardInterrupt

        monkeypatch.setattr("prunekit.recipe.start.named_scan.scan_named", interrupted)
        words = ("sensitivity", stored, "--data", "d.npz", "-o", "scan")
        assert "continues" not in run(*words)[2]
        Path("scan").mkdir()
        Path("scan/sensitivity.json").touch()
        code, _, err = run(*words)
        assert code == 130 and "What was measured is kept in scan: the same command continues." in err

    def test_the_help_lists_all_words_of_an_option(self, run):
        text = " ".join(run("prune", "--help")[1].split())
        assert ", ".join(shorthands.ALLOCATIONS) in text
        assert "default: (weights with --data or --criterion auto, otherwise none)" in text

    def test_without_data_the_model_is_repaired_on_synthetic_inputs_and_a_note_says_so(self, run, stored):
        code, out, err = run("prune", stored, "--sparsity", "0.5", "-o", "new.keras")
        assert code == 0 and "Output errors" in out
        assert "note: No data were given: the weights were fitted on 1,024 synthetic inputs." in err
        code, out, err = run("prune", stored, "--sparsity", "0.5", "-o", "new.keras", "--repair", "none", "--force")
        assert code == 0 and "Output errors" not in out and "synthetic" not in err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["MODEL", "--sparsity", "0.5", "-o", "new.keras", "--label", "y"], "--label needs --data."),
            (["MODEL", "--sparsity", "0.5", "-o", "new.keras", "--data", "d.csv"], "d.csv"),
            (["gone.keras", "--sparsity", "0.5", "-o", "new.keras"], "gone.keras: no such file."),
            (["MODEL", "--sparsity", "0.5", "-o", "new.h5"], "-o takes the name of a .keras file. Received: 'new.h5'."),
            (["MODEL", "--sparsity", "0.5", "-o", "MODEL"], "-o names a new file; MODEL is another one."),
            (["MODEL", "--sparsity", "50", "-o", "new.keras"], "Received: sparsity=50.0. For 50 %, pass 0.5."),
            (["MODEL", "--sparsity", "0.5", "-o", "new.keras", "--exclude", "nothing"], "nothing"),
        ],
        ids=["label alone", "csv", "no model", "other format", "existing", "percentage", "no such weight"],
    )
    def test_a_mistake_is_one_line_and_writes_nothing(self, run, stored, arguments, message):
        before = stored.read_bytes()
        assert_mistake(run("prune", *[stored if word == "MODEL" else word for word in arguments]), message)
        assert stored.read_bytes() == before and not Path("new.keras").exists()


class TestShrink:
    @pytest.mark.every_backend
    def test_a_model_is_shrunk_into_a_new_file(self, run, stored):
        import keras

        before = stored.read_bytes()
        code, out, _ = run("shrink", stored, "--channels", "0.5", "-o", "new/net.keras")
        assert code == 0 and "Groups of channels" in out and "Channels that stay" in out
        left = "56 of 108 parameters (0.519), 48 of 96 MACs (0.500), 4 of 8 channels are left."
        assert out.endswith(f"\n{left} Written to new/net.keras\n")
        assert stored.read_bytes() == before
        shapes = [one.shape for one in keras.models.load_model("new/net.keras").get_weights()]
        assert shapes == [(8, 4), (4,), (4, 4), (4,)]
        assert [path.name for path in Path("new").iterdir()] == ["net.keras"]

    def test_channels_nonzero_takes_approximations(self, run):
        import keras

        inputs = keras.Input((8,))
        dense = keras.layers.Dense(6)
        outputs = keras.layers.Dense(3)(keras.layers.LayerNormalization()(dense(inputs)))
        model = keras.Model(inputs, outputs)
        dense.kernel.assign(dense.kernel.numpy() * [1, 1, 0, 1, 0, 1])
        model.save("norm.keras")
        options = ("shrink", "norm.keras", "--channels", "nonzero", "-o", "new.keras")
        assert_mistake(run(*options), "has no channels that can be removed")
        code, out, _ = run(*options, "--approximate", "layer_normalization")
        assert code == 0 and "4 of 6 channels are left. Written to new.keras" in out

    def test_channels_nonzero_removes_the_channels_whose_kernels_are_zero(self, run, stored):
        import keras
        import numpy as np

        model = keras.models.load_model(stored, compile=False)
        kernel = np.array(model.get_layer("hidden").kernel)
        kernel[:, [1, 4, 6]] = 0
        model.get_layer("hidden").kernel.assign(kernel)
        model.get_layer("hidden").bias.assign(np.ones(8))
        model.save("zeros.keras")
        code, out, _ = run("shrink", "zeros.keras", "--channels", "nonzero", "-o", "new.keras")
        assert code == 0 and "Adjustments" in out and "5 of 8 channels are left." in out
        x = np.random.default_rng(0).normal(size=(3, 8)).astype("float32")
        smaller = keras.models.load_model("new.keras")
        assert smaller.get_layer("hidden").units == 5
        np.testing.assert_allclose(smaller.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("target", [("--macs", "0.5"), ("--parameters", "0.515")], ids=["macs", "parameters"])
    def test_the_other_targets_and_options_are_those_of_python(self, run, stored, target):
        options = ("--criterion", "l2", "--allocation", "global", "--multiple", "4", "--include", "hidden")
        code, out, _ = run("shrink", stored, *target, *options, "-o", "new.keras", "--json")
        found = json.loads(out)
        assert code == 0 and found["path"] == "new.keras"
        assert [(group["name"], group["after"]) for group in found["report"]["groups"]] == [("hidden", 4)]

    def test_bytes_and_latency_are_measured_and_shown(self, run, stored, monkeypatch):
        import numpy as np

        from prunekit.delivery.litert import model_measures
        from prunekit.delivery.litert.latency import Latencies

        code, out, _ = run("shrink", stored, "--bytes", "0.9", "-o", "new.keras")
        assert code == 0 and "Measured size" in out and " bytes (0." in out

        def as_sizes(files, inputs, seconds, precision):
            return Latencies(np.array([[file.stat().st_size for file in files]] * 15, float))

        monkeypatch.setattr(model_measures, "measured_latencies", as_sizes)
        code, out, _ = run(
            "shrink", stored, "--latency", "0.9", "-o", "new.keras", "--force", "--json", "--repair", "none"
        )
        measured = json.loads(out)["report"]["measured"]
        assert code == 0 and (measured["name"], measured["unit"]) == ("latency", "ms")
        assert abs(measured["after"] / measured["before"] - 0.9) < 0.02

    def test_with_data_the_layers_are_repaired_and_their_errors_are_shown(self, run, stored):
        import numpy as np

        rng = np.random.default_rng(0)
        np.savez("d.npz", x_train=rng.normal(size=(80, 8)).astype("float32"), y_train=rng.normal(size=(80, 4)))
        options = ("--channels", "0.5", "--data", "d.npz", "--examples", "60", "-o", "new.keras")
        code, out, _ = run("shrink", stored, *options, "--criterion", "mean_activation")
        assert code == 0 and "Errors of the layers" in out
        code, out, _ = run("shrink", stored, *options, "--repair", "none", "--force", "--json")
        assert code == 0 and json.loads(out)["report"]["errors"] == []

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["MODEL", "-o", "new.keras"], "--parameters, --macs, --bytes, --latency. Received: none."),
            (["MODEL", "--channels", "0.5", "--macs", "0.5", "-o", "new.keras"], "Received: --channels and --macs."),
            (["MODEL", "--channels", "50", "-o", "new.keras"], "For 50 %, pass 0.5."),
            (["MODEL", "--channels", "none", "-o", "new.keras"], "a number such as 0.5, or nonzero. Received: 'none'."),
            (
                ["MODEL", "--channels", "nonzero", "--input-shape", "1,8", "-o", "new.keras"],
                "Received: --input-shape, which would have no effect.",
            ),
            (
                ["MODEL", "--channels", "nonzero", "--allocation", "global", "-o", "new.keras"],
                "Received: --allocation, which would have no effect.",
            ),
            (["MODEL", "--macs", "0.001", "-o", "new.keras"], "The reachable range is"),
            (["MODEL", "--bytes", "0.1", "-o", "new.keras"], "bytes=0.1 cannot be reached within 10%"),
            (["MODEL", "--latency", "60", "-o", "new.keras"], "For 60 %, pass 0.6."),
            (["MODEL", "--channels", "3", "-o", "new.keras"], "3 of the model's 8 removable channels, pass"),
            (["MODEL", "--channels", "0.5", "-o", "new.keras", "--label", "y"], "--label needs --data."),
            (["MODEL", "--channels", "0.5", "-o", "new.keras", "--exclude", "nothing"], "nothing"),
            (
                ["MODEL", "--channels", "0.5", "-o", "new.keras", "--exclude", "hidden"],
                "no channels that can be removed",
            ),
            (["MODEL", "--channels", "0.5", "-o", "MODEL"], "-o names a new file; MODEL is another one."),
            (["MODEL", "--channels", "0.5", "-o", "new.h5"], "-o takes the name of a .keras file."),
            (["gone.keras", "--channels", "0.5", "-o", "new.keras"], "gone.keras: no such file."),
        ],
    )
    def test_a_mistake_is_one_line_and_writes_nothing(self, run, stored, arguments, message):
        before = stored.read_bytes()
        assert_mistake(run("shrink", *[stored if word == "MODEL" else word for word in arguments]), message)
        assert stored.read_bytes() == before and not Path("new.keras").exists()

    def test_an_interrupted_save_leaves_no_file(self, run, stored, monkeypatch):
        import keras

        def broken(self, path, *arguments, **options):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(keras.Model, "save", broken)
        assert_mistake(run("shrink", stored, "--channels", "0.5", "-o", "new.keras"), "No space left")
        assert not [path for path in Path(".").iterdir() if path.suffix == ".keras"]


class TestFewerLayers:
    @pytest.fixture
    def residual(self):
        import keras
        import numpy as np

        keras.utils.set_random_seed(1)
        inputs = keras.Input((8,))
        x = keras.layers.Dense(6, activation="relu", name="stem")(inputs)
        for name in ("first", "second"):
            y = keras.layers.BatchNormalization(name=f"{name}_norm")(keras.layers.Dense(6, name=f"{name}_dense")(x))
            x = keras.layers.Add(name=name)([x, y])
        keras.Model(inputs, keras.layers.Dense(3, name="logits")(x), name="net").save("net.keras")
        np.savez("data.npz", x_train=np.random.default_rng(0).random((40, 8)), y_train=np.arange(40) % 3)

    @pytest.mark.every_backend
    def test_a_model_is_simplified_into_a_new_file(self, run, residual):
        import keras
        import numpy as np

        code, out, _ = run("simplify", "net.keras", "-o", "new.keras")
        assert code == 0 and "first_norm" in out and out.endswith("parameters. Written to new.keras\n")
        old, new = (keras.models.load_model(name) for name in ("net.keras", "new.keras"))
        x = np.random.default_rng(0).random((5, 8))
        assert len(new.layers) == len(old.layers) - 2
        np.testing.assert_allclose(new.predict(x, verbose=0), old.predict(x, verbose=0), rtol=1e-4, atol=1e-5)

    def test_blocks_are_removed_into_a_new_file(self, run, residual):
        import keras

        options = ("--data", "data.npz", "--exclude", "first")
        code, out, _ = run("remove-blocks", "net.keras", "-o", "new.keras", *options)
        assert code == 0 and "Removed second: 8 -> 5 layers" in out
        assert not any(layer.name.startswith("second") for layer in keras.models.load_model("new.keras").layers)
        code, out, _ = run("remove-blocks", "net.keras", "-o", "new.keras", *options, "--force", "--json")
        assert code == 0 and json.loads(out)["report"]["blocks"][0]["name"] == "second"

    def test_inputs_without_labels_are_enough_and_none_are_held_out(self, run, residual):
        import numpy as np

        np.savez("inputs.npz", x=np.random.default_rng(0).random((1, 8)))
        code, out, _ = run("remove-blocks", "net.keras", "-o", "new.keras", "--data", "inputs.npz")
        assert code == 0 and "Removed " in out
        np.savez("other.npz", q=np.zeros((2, 8)))
        assert_mistake(
            run("remove-blocks", "net.keras", "-o", "other.keras", "--data", "other.npz"),
            "has no training inputs under a usual name; it has 'q'. Tried: x, x_train, ",
        )

    def test_a_model_with_nothing_to_simplify_is_said_to_be(self, run):
        import keras

        keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]).save("plain.keras")
        code, out, _ = run("simplify", "plain.keras", "-o", "new.keras")
        assert code == 0 and out.endswith("Nothing to simplify: 1 layers, 15 parameters. Written to new.keras\n")

    @pytest.mark.parametrize("command", ["simplify", "shrink", "prune", "remove-blocks"])
    def test_paths_that_cannot_be_are_refused_before_any_work(self, run, residual, command):
        Path("folder.keras").mkdir()
        Path("file").write_text("")
        options = {
            "simplify": [],
            "shrink": ["--macs", "0.0001"],
            "prune": ["--sparsity", "7"],
            "remove-blocks": ["--data", "gone.npz"],
        }[command]
        for model, output, message in (
            ("net.keras", "folder.keras", "-o takes the name of a .keras file. Received: the folder 'folder.keras'."),
            ("folder.keras", "new.keras", "MODEL takes the name of a .keras file. Received: the folder"),
            ("net.keras", "file/new.keras", "file/new.keras cannot be written: "),
        ):
            assert_mistake(run(command, model, "-o", output, "--force", *options), message)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["remove-blocks", "net.keras", "-o", "new.keras"], "Missing option '--data'"),
            (
                ["remove-blocks", "net.keras", "-o", "new.keras", "--data", "data.npz", "--blocks", "5"],
                "blocks=5; 2 can",
            ),
            (["remove-blocks", "gone.keras", "-o", "new.keras", "--data", "data.npz"], "gone.keras: no such file."),
            (["simplify", "net.keras", "-o", "net.keras"], "-o names a new file; MODEL is another one."),
            (["simplify", "net.keras", "-o", "new.h5"], "-o takes the name of a .keras file."),
        ],
    )
    def test_a_mistake_is_one_line_and_writes_nothing(self, run, residual, arguments, message):
        assert_mistake(run(*arguments), message)
        assert not Path("new.keras").exists()


@pytest.mark.parametrize("command", ["prune", "shrink", "quantize"])
def test_memory_is_that_of_python_in_megabytes(run, stored, monkeypatch, command):
    import numpy as np

    from prunekit.core.layerwise import layerwise

    rng, given, plain = np.random.default_rng(0), [], layerwise.walk
    np.savez("d.npz", x_train=rng.normal(size=(20, 8)).astype("float32"), y_train=rng.normal(size=(20, 4)))
    monkeypatch.setattr(layerwise, "walk", lambda *args: given.append(args[-1]) or plain(*args))
    size = {"prune": ["--sparsity", "0.5"], "shrink": ["--channels", "0.5"], "quantize": ["--bits", "4"]}[command]
    output = "new.tflite" if command == "quantize" else "new.keras"
    code, _, err = run(command, stored, *size, "--data", "d.npz", "--memory", "3MB", "-o", output)
    assert code == 0, err
    assert set(given) == {3e6}


def test_memory_without_a_repair_is_refused(run, stored):
    found = run("shrink", stored, "--channels", "nonzero", "--memory", "5MB", "-o", "new.keras")
    assert_mistake(found, "Received: --memory, which would have no effect.")
