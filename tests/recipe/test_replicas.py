import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import yaml
from backends import BACKEND
from clusters import environment, run, run_workers
from interrupted_recipes import ended, lines, write

from prunekit.anatomy.files.digests import weight_arrays
from prunekit.recipe.datasets.batches import Order
from prunekit.recipe.datasets.parts import ArrayPart
from prunekit.recipe.run.runner import compress, plan
from prunekit.recipe.settings.compile_fields import Compile
from prunekit.recipe.state import replica_state, replicas as replicas_module
from prunekit.recipe.state.models import load_model
from prunekit.recipe.state.replicas import ALONE, Replicas, check_distribution, distributed
from prunekit.recipe.text.loader import RecipeError, load_recipe

pytestmark = pytest.mark.skipif(BACKEND != "tensorflow", reason="starts processes of each backend itself")
CONFIG = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}}
# 70 examples in batches of 24: the last has 22.
COMPILE = {"optimizer": {"name": "adam", "learning_rate": 0.01}, "batch_size": 24, "from_logits": True}
STEPS = [
    {
        "prune": {
            "epochs": 2,
            "schedule": {"type": "linear", "final_sparsity": 0.8, "end": {"epochs": 1.5}},
            "allocation": "uniform",
        }
    },
    {"finetune": {"epochs": 1}},
    {"export": {"formats": ["keras"]}},
    {"expect": {"sparsity": {"min": 0.8, "max": 0.8}, "bytes": {"keras": {"max": 100_000}}}},
]


def recipe(**others):
    return {"version": 1, "name": "tiny", "seed": 4, "compile": COMPILE, "steps": STEPS, **others}


@contextlib.contextmanager
def first_of_two(address, folder):
    """A process that compresses as worker 0 at `address`, and whose worker 1 never starts; gone at the end."""
    config = {"cluster": {"worker": [address, "127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
    command = [sys.executable, "-m", "prunekit", "compress", write(folder, "multi_worker"), "-o", folder / "run"]
    more = environment(TF_CONFIG=json.dumps(config))
    # A shell's background jobs ignore SIGINT, and their children inherit that.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=more)
    finally:
        signal.signal(signal.SIGINT, former)
    with process:
        try:
            yield process
        finally:
            process.kill()


def listens(port):
    with socket.socket() as own:
        return own.connect_ex(("127.0.0.1", port)) == 0


def optimizer_with(argument):
    return {"optimizer": {"arguments": {argument: 2}}}


@pytest.fixture
def on_disk(perceptron, samples, tmp_path):
    """A recipe of files alone: (kind -> its path, the result on one replica)."""
    (x, y), model = samples, tmp_path / "in.keras"
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    perceptron.save(model)

    def written(kind):
        path = tmp_path / f"{kind}.yaml"
        found = recipe(model={"file": str(model)}, data={"npz": str(tmp_path / "d.npz")})
        path.write_text(yaml.safe_dump(found if kind == "one" else found | {"distribute": kind}))
        return path

    return written, compress(written("one"), output=tmp_path / "one").model


def assert_as_one(directory, one):
    found = weight_arrays(load_model(directory / "model.keras"))
    for name, value in weight_arrays(one).items():
        np.testing.assert_array_equal(found[name] == 0, value == 0)
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=5e-7)


class TestRuns:
    @pytest.mark.thorough
    def test_mirrored_ends_like_one_replica_and_is_verified(self, on_disk, tmp_path):
        written, one = on_disk
        program = (
            "from distributed_training import split_cpu\n"
            "split_cpu(3)\n"
            "from prunekit.cli import run\n"
            f"code = run(['compress', {str(written('mirrored'))!r}, '-o', {str(tmp_path / 'run')!r}])\n"
            f"raise SystemExit(code or run(['verify', {str(tmp_path / 'run')!r}]))"
        )
        assert "reproduced, bit for bit" in run("-c", program)
        assert_as_one(tmp_path / "run", one)
        report = json.loads((tmp_path / "run" / "report.json").read_text())
        assert (
            "distribute: mirrored trained on 3 replicas; another number of replicas rounds differently."
            in report["notes"]
        )
        assert load_recipe(tmp_path / "run" / "recipe.lock.yaml", data_given=True).distribute == "mirrored"

    @pytest.mark.thorough
    @pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
    def test_several_jax_devices_give_the_weights_of_one(self, on_disk, tmp_path):
        written, _ = on_disk
        for kind, devices in (("one", 1), ("data_parallel", 2)):
            command = ("-m", "prunekit.cli", "compress", written(kind), "-o", tmp_path / f"jax_{kind}")
            flags = f"--xla_force_host_platform_device_count={devices}"
            run(*command, KERAS_BACKEND="jax", XLA_FLAGS=flags)
        assert_as_one(tmp_path / "jax_data_parallel", load_model(tmp_path / "jax_one" / "model.keras"))

    @pytest.mark.thorough
    def test_only_the_chief_writes_and_every_worker_succeeds(self, on_disk, tmp_path):
        written, one = on_disk
        command = ("-m", "prunekit.cli", "compress", written("multi_worker"), "-o", tmp_path / "run")
        first, second = run_workers(2, *command)
        assert (first.code, second.code) == (0, 0), first.output[-2000:] + second.output[-2000:]
        assert f"Written to {tmp_path / 'run'}" in first.output
        assert "this process is not the chief" in second.output
        for each in (first, second):
            assert "waiting for 1 other worker of TF_CONFIG" in each.output
        assert_as_one(tmp_path / "run", one)
        kept = {"model.keras", "exports", "report.json", "report.html", "recipe.lock.yaml"}
        assert {path.name for path in (tmp_path / "run").iterdir()} == kept
        assert {path.name for path in tmp_path.iterdir()} == {
            *("in.keras", "d.npz", "one", "one.yaml", "run", "multi_worker.yaml")
        }


INTERRUPTED = Path(__file__).parents[1] / "support" / "interrupted_recipes.py"


def both_compress(folder, output, *words):
    """Two workers to the end: none dies where one died before."""
    for each in run_workers(2, INTERRUPTED, "multi_worker", folder, output, 1, *words):
        assert each.code == 0, each.output[-4000:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with a recipe, and its run by two workers in "whole"."""
    folder = tmp_path_factory.mktemp("workers")
    write(folder, "multi_worker")
    (folder / "died").touch()
    both_compress(folder, "whole")
    return folder


class TestInterruptions:
    @pytest.mark.thorough
    @pytest.mark.parametrize("kind", ["mirrored", "data_parallel"])
    def test_a_run_on_several_devices_is_resumed_to_the_same_bytes(self, kind, tmp_path):
        if kind == "data_parallel":
            pytest.importorskip("jax")
        more = {"KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        printed = run(INTERRUPTED, kind, tmp_path, **(more if kind == "data_parallel" else {}))
        facts = json.loads(printed.splitlines()[-1])
        assert facts["begun"] == ["checkpoint-000001", "checkpoint-000002"]
        assert facts["same"] == [True, True], "weights, report"
        assert "cannot be resumed: replicas was 3 and is 2. Undo these changes" in facts["said"]

    @pytest.mark.thorough
    @pytest.mark.parametrize("victim", [1, 0], ids=["a worker", "the chief"])
    def test_a_cluster_that_lost_a_worker_resumes_to_the_same_bytes(self, undisturbed, victim):
        folder, run = undisturbed, undisturbed / f"run-{victim}"
        (folder / "died").unlink()
        both = run_workers(2, INTERRUPTED, "multi_worker", folder, run.name, victim, after_a_death=60)
        survivor = both[1 - victim]
        assert (survivor.code, both[victim].code) == (2, -9), survivor.output[-4000:]
        said = lines(survivor.output)
        assert "another process of TF_CONFIG ended" in said[-1]
        assert "start all processes again: with --resume" in said[-1]
        assert "Traceback" not in survivor.output
        unfinished = run.with_name(f"{run.name}.unfinished")
        assert {path.name for path in unfinished.glob("checkpoint-*")} == {"checkpoint-000001", "checkpoint-000002"}
        both_compress(folder, run.name, "--resume")
        resumed, whole = ended(run), ended(folder / "whole")
        assert resumed[0] == whole[0] and resumed[1] == whole[1], "statistics of both replicas are in the accuracy"
        assert not unfinished.exists()

    @pytest.mark.thorough
    def test_a_finished_run_of_workers_is_returned_as_it_is(self, undisturbed):
        before = {path: path.stat().st_mtime_ns for path in (undisturbed / "whole").rglob("*")}
        both_compress(undisturbed, "whole", "--resume")
        assert {path: path.stat().st_mtime_ns for path in (undisturbed / "whole").rglob("*")} == before
        assert not (undisturbed / "whole.unfinished").exists()

    def test_the_error_names_the_facts_in_which_processes_differ(self, monkeypatch):
        workers = Replicas("multi_worker", 2, strategy=object())
        monkeypatch.setattr(replica_state, "replicas_here", lambda strategy: [0])
        monkeypatch.setattr(replica_state, "gathered", lambda strategy, rows: np.stack([rows[0], rows[0]]))
        workers.agree({"model": "a", "output": "checkpoint-000001"})
        monkeypatch.setattr(replica_state, "gathered", lambda strategy, rows: np.stack([rows[0], rows[0] + [0, 1]]))
        with pytest.raises(RecipeError, match="differ in: output. Start all of them .* folder that all of them see"):
            workers.agree({"model": "a", "output": "checkpoint-000001"})
        Replicas("mirrored", 2, strategy=object()).agree({"model": "a"})

    @pytest.mark.parametrize(
        ("error", "kind", "message"),
        [
            ("InternalError", RecipeError, "the same cluster in every process, .* a different cluster in another"),
            ("InvalidArgumentError", RecipeError, "must have the same cluster in every process"),
            ("UnavailableError", ConnectionError, "another process of TF_CONFIG ended, or cannot be reached"),
        ],
    )
    def test_different_clusters_and_lost_workers_are_reported(self, error, kind, message, monkeypatch):
        import tensorflow as tf

        def fail(strategy, rows):
            raise getattr(tf.errors, error)(None, None, "joining a group with size3, but that group has size 2")

        monkeypatch.setenv("TF_CONFIG", json.dumps(CONFIG))
        monkeypatch.setattr(replicas_module, "_strategy", lambda kind: types.SimpleNamespace(num_replicas_in_sync=2))
        monkeypatch.setattr(replica_state, "replicas_here", lambda strategy: [0])
        monkeypatch.setattr(replica_state, "gathered", fail)
        with pytest.raises(kind, match=message) as caught:
            with distributed(load_recipe(recipe(distribute="multi_worker"), data_given=True)):
                raise AssertionError("they have not met")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("kind", ["mirrored", "multi_worker"])
    def test_a_lost_process_is_distinguished_from_a_wrong_loss(self, kind):
        import tensorflow as tf

        workers = Replicas(kind, 2, strategy=object())
        assert workers.means_lost_worker(tf.errors.UnavailableError(None, None, "gone")) is (kind == "multi_worker")
        assert not workers.means_lost_worker(tf.errors.InvalidArgumentError(None, None, "shapes"))
        # The model could not be built, because the other one did not answer.
        told = RecipeError("the file cannot be read")
        told.__cause__ = tf.errors.UnavailableError(None, None, "gone")
        assert workers.means_lost_worker(told) is (kind == "multi_worker")

    def test_each_replica_gets_its_own_statistics_back(self):
        strategy = types.SimpleNamespace(
            experimental_distribute_values_from_function=lambda make: [
                make(types.SimpleNamespace(replica_id_in_sync_group=replica)) for replica in (0, 1)
            ],
            experimental_local_results=lambda values: values,
            num_replicas_in_sync=2,
        )
        tf = pytest.importorskip("tensorflow")
        pair = [tf.Variable([0.5, np.nan, -0.0], dtype="float32"), tf.Variable([1.0, 2.0, 3.0], dtype="float32")]
        half, trained = [tf.Variable(7.0, dtype="bfloat16"), tf.Variable(9.0, dtype="bfloat16")], object()
        kept = [types.SimpleNamespace(_value=values) for values in (pair, half)]
        model = types.SimpleNamespace(variables=[trained, *kept], trainable_variables=[trained])
        before = [copy.numpy().tobytes() for copy in (*pair, *half)]
        state = replica_state.own_state(strategy, model)
        assert state.shape == (2, 3) and state.dtype == np.int64
        for copy in (*pair, *half):
            copy.assign(tf.zeros_like(copy))
        replica_state.restore_own_state(strategy, model, state)
        assert [copy.numpy().tobytes() for copy in (*pair, *half)] == before
        model.variables = [trained]
        assert replica_state.own_state(strategy, model) is None


class TestRefusals:
    @pytest.mark.parametrize("kind", ["mirrored", "multi_worker"])
    def test_tensorflow_kinds_are_refused_on_another_backend(self, kind, monkeypatch):
        monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
        with pytest.raises(RecipeError, match=f"distribute: {kind} needs Keras's tensorflow backend. Received: jax"):
            compress(recipe(distribute=kind, model={"builtin": "digits-cnn"}, data={"builtin": "digits"}))

    @pytest.mark.parametrize("backend", ["tensorflow", "torch"])
    def test_data_parallel_without_jax(self, backend, monkeypatch):
        monkeypatch.setattr(keras.backend, "backend", lambda: backend)
        with pytest.raises(RecipeError, match=f"needs Keras's jax backend. Received: {backend}. Run with KERAS_BACK"):
            plan(recipe(distribute="data_parallel", model={"builtin": "digits-cnn"}, data={"builtin": "digits"}))

    def test_a_built_model_is_refused(self, perceptron, samples):
        with pytest.raises(RecipeError, match="mirrored builds the model itself.*give the path of the file"):
            compress(recipe(distribute="mirrored"), perceptron, (samples, samples))

    def test_missing_tf_config_is_refused(self, monkeypatch):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        with pytest.raises(RecipeError, match="which is not set: set it in each process to {"):
            check_distribution(load_recipe(recipe(distribute="multi_worker"), data_given=True), None)

    @pytest.mark.parametrize(
        "config",
        [
            "{",
            "[]",
            "{}",
            json.dumps(CONFIG | {"task": {"type": "worker", "index": 2}}),
            json.dumps(CONFIG | {"task": {"type": "worker", "index": -1}}),
            json.dumps(CONFIG | {"task": {"type": "evaluator", "index": 0}}),
            json.dumps(CONFIG | {"task": {"type": "chief", "index": 0}}),
            json.dumps(CONFIG | {"task": None}),
            json.dumps(CONFIG | {"task": {"type": "worker", "index": 0.7}}),
            json.dumps(CONFIG | {"task": {"type": "worker", "index": 0}}).replace('"index": 0', '"index": 1e400'),
            json.dumps(CONFIG | {"cluster": {"worker": "127.0.0.1:1"}}),
            json.dumps(CONFIG | {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:1"]}}),
            json.dumps(CONFIG | {"cluster": {"worker": ["127.0.0.1", "127.0.0.1:1"]}}),
            json.dumps(CONFIG | {"cluster": {"worker": [1, 2]}}),
            json.dumps(CONFIG | {"cluster": {"worker": ["127.0.0.1:99999", "127.0.0.1:1"]}}),
            json.dumps(CONFIG | {"cluster": {"worker": ["127.0.0.1:0", "127.0.0.1:1"]}}),
        ],
    )
    def test_invalid_tf_config_is_refused(self, config, monkeypatch):
        monkeypatch.setenv("TF_CONFIG", config)
        with pytest.raises(
            RecipeError, match="TF_CONFIG must have the form .*, name a worker, and .* address. Received: "
        ):
            check_distribution(load_recipe(recipe(distribute="multi_worker"), data_given=True), None)

    @pytest.mark.thorough
    def test_a_port_of_another_process_is_refused(self, tmp_path):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            here = f"127.0.0.1:{taken.getsockname()[1]}"
            with first_of_two(here, tmp_path) as process:
                printed = process.communicate(timeout=120)[0]
        assert process.returncode == 2 and printed.count("error:") == 1 and "Traceback" not in printed
        assert f"this process cannot listen at {here}, its address in TF_CONFIG" in lines(printed)[-1]
        assert not (tmp_path / "run").exists()

    @pytest.mark.thorough
    def test_ctrl_c_ends_a_process_that_waits_for_another(self, tmp_path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with first_of_two(f"127.0.0.1:{port}", tmp_path) as process:
            # Once TensorFlow listens, it waits.
            while not listens(port):
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == -signal.SIGINT
        assert not (tmp_path / "run").exists()

    def test_workers_are_refused_in_a_process_that_has_used_tensorflow(self, monkeypatch):
        monkeypatch.setenv("TF_CONFIG", json.dumps(CONFIG))
        keras.ops.zeros(()) + 1
        found = load_recipe(recipe(distribute="multi_worker"), data_given=True)
        check_distribution(found, None)
        with pytest.raises(RecipeError, match="connects its workers before TensorFlow does anything else"):
            with distributed(found):
                pass

    @pytest.mark.parametrize(
        ("replicas", "settings", "examples", "message"),
        [
            (4, {"batch_size": 30}, 60, "a multiple of their number, 4. Received: 30"),
            (
                2,
                {"batch_size": 24},
                73,
                "the last batch of an epoch has 1 of 73 examples, which leaves one of 2 replicas without",
            ),
            # Two each, and none for the last.
            (4, {"batch_size": 24}, 30, "has 6 of 30 examples, which leaves one of 4 replicas without"),
            (2, optimizer_with("gradient_accumulation_steps"), 64, "gradient_accumulation_steps does not work"),
            (2, optimizer_with("ema_overwrite_frequency"), 64, "ema_overwrite_frequency does not work"),
        ],
    )
    def test_batches_and_options_that_replicas_cannot_share_are_refused(self, replicas, settings, examples, message):
        with pytest.raises(RecipeError, match=message):
            Replicas("mirrored", replicas, strategy=object()).check(Compile(**settings), {"training": examples})

    def test_on_jax_every_batch_is_divided_evenly(self):
        parallel = Replicas("data_parallel", 2)
        parallel.check(Compile(batch_size=24), {"training": 70, "validation": 2, "test": 6})
        message = "evenly between its 2 devices, the last one included. Received: 71 test examples. Set data: {limit"
        with pytest.raises(RecipeError, match=message):
            parallel.check(Compile(batch_size=24), {"training": 70, "validation": 2, "test": 71})


@pytest.mark.parametrize(("replicas", "examples"), [(2, 70), (3, 70), (4, 31), (4, 48), (1, 1)])
def test_batches_that_divide_between_replicas_are_accepted(replicas, examples):
    mirrored = Replicas("mirrored", replicas, strategy=object())
    assert mirrored.check(Compile(batch_size=24), {"training": examples}) is None


def test_without_distribute_there_is_one_replica():
    with distributed(load_recipe(recipe(), data_given=True)) as replicas:
        assert replicas is ALONE
    assert (ALONE.count, ALONE.chief, ALONE.means, ALONE.notes()) == (1, True, 1, [])
    ALONE.check(Compile(batch_size=7), {"training": 9})


@pytest.mark.parametrize(("count", "replicas"), [(22, 2), (5, 2), (22, 3), (7, 4), (24, 4), (1, 2), (6, 4)])
def test_sample_weights_make_the_mean_over_replicas_the_mean_over_the_batch(count, replicas):
    losses = np.arange(count, dtype="float32") ** 2
    ((_, drawn, weights),) = ArrayPart(np.zeros(count), losses).training_batches(Order(count, 0), count, replicas)
    drawn, weights, part = drawn.numpy(), weights.numpy(), -(-count // replicas)
    parts = [slice(begin, begin + part) for begin in range(0, count, part)]
    means = [np.mean(drawn[one] * weights[one]) for one in parts]
    assert np.sum(means) / replicas == pytest.approx(losses.mean(), rel=1e-6)
    assert count % replicas or (weights == 1).all()


def test_one_replica_has_no_weights():
    assert len(next(iter(ArrayPart(np.zeros(4), np.zeros(4)).training_batches(Order(4, 0), 4)))) == 2
