"""Several replicas: in one process, in several worker processes, on several JAX devices.

Devices are split, and workers started, before TensorFlow looks at them: each distribution trains in processes of its
own (distributed_training.py), which write down what every update left on each replica.
"""

import contextlib
import importlib.util
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from backends import BACKEND
from clusters import run, run_workers
from distributed_training import EPOCHS, ROWS

import prunekit as pk

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(BACKEND != "tensorflow", reason="starts processes of each backend itself")
WORKERS = ["adam", "ragged", "second_fit", "loop", "movement", "short"]
JAX = ["adam", "ragged", "second_fit", "short", "global", "averages", "muon", "accumulated"]
# Keras does not accumulate gradients under tf.distribute.
MIRRORED = [name for name in ROWS if name != "accumulated"]
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
# Kind, replicas, rows: all of them once, the main ones on each.
KINDS = [
    pytest.param("mirrored", 2, MIRRORED, id="2 mirrored"),
    pytest.param("mirrored", 4, ["ragged", "loop"], id="4 mirrored"),
    pytest.param("multi_worker", 2, WORKERS, id="2 workers"),
    pytest.param("multi_worker", 3, ["adam", "ragged"], id="3 workers"),
    pytest.param("data_parallel", 2, JAX, id="2 JAX devices", marks=needs_jax),
    pytest.param("data_parallel", 4, ["adam"], id="4 JAX devices", marks=needs_jax),
]
# What the short suite trains: one distribution of each kind, and in it one row of each way to train.
SHORT = {"2 mirrored": ["adam", "ragged", "loop", "short"], "2 workers": ["adam", "short"]}


def case(kind, name):
    """One row on one distribution."""
    marks = [*kind.marks, *([] if name in SHORT.get(kind.id, ()) else [pytest.mark.thorough])]
    return pytest.param(kind.values[0], kind.values[1], name, id=f"{kind.id} {name}", marks=marks)


CASES = [case(kind, name) for kind in KINDS for name in kind.values[2]]
SCRIPT = TESTS / "support" / "distributed_training.py"


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """(kind, replicas) -> (the facts of each process, the folder); each trains once, the rows that are tested here."""
    folder, done = tmp_path_factory.mktemp("distributed"), {}
    # The tests of processes look at these two.
    tested = {"adam", "short"}
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            tested.add(item.callspec.params.get("name"))

    def facts(kind, replicas):
        if (kind, replicas) not in done:
            # Once, also where it fails.
            done[kind, replicas] = []
            known = {(each.values[0], each.values[1]): each.values[2] for each in KINDS}
            names = known.get((kind, replicas), JAX if kind == "one_device" else MIRRORED)
            arguments = (SCRIPT, kind, replicas, folder, *(name for name in names if name in tested))
            if kind in ("one_device", "data_parallel"):
                run(*arguments, KERAS_BACKEND="jax", XLA_FLAGS=f"--xla_force_host_platform_device_count={replicas}")
            elif kind == "multi_worker":
                for worker in run_workers(replicas, *arguments):
                    assert worker.code == 0, worker.output[-4000:]
            else:
                run(*arguments)
            done[kind, replicas] = [dict(np.load(path)) for path in sorted(folder.glob(f"{kind}-{replicas}-*.npz"))]
        assert done[kind, replicas], f"{replicas} x {kind} failed to train, in an earlier test"
        return done[kind, replicas], folder

    return facts


def part(facts, prefix):
    return {name.removeprefix(prefix): value for name, value in facts.items() if name.startswith(prefix)}


@pytest.mark.parametrize(("kind", "replicas", "name"), CASES)
class TestEveryReplica:
    @pytest.mark.short(cases=2)
    def test_weights_slots_and_masks_are_equal_on_all_after_every_update(self, trained, kind, replicas, name):
        processes, _ = trained(kind, replicas)
        assert len(processes) == (replicas if kind == "multi_worker" else 1)
        updates = EPOCHS * -(-ROWS[name].examples // ROWS[name].batch) * ROWS[name].fits
        for facts in processes:
            assert facts[f"{name}/copies"] * len(processes) == replicas
            assert facts[f"{name}/unequal"] == 0
            assert len(facts[f"{name}/digests"]) == updates
            assert (facts[f"{name}/digests"] == processes[0][f"{name}/digests"]).all()
        assert len(set(processes[0][f"{name}/digests"])) == updates, "the weights moved"

    def test_zeros_hold_on_all_after_every_update_and_at_the_end(self, trained, kind, replicas, name):
        for facts in trained(kind, replicas)[0]:
            assert facts[f"{name}/leaks"] == facts[f"{name}/leaks_at_the_end"] == 0
            masks, weights = part(facts, f"{name}/masks/"), part(facts, f"{name}/weights/")
            assert masks.keys() == {"hidden/kernel", "logits/kernel"}
            for target, mask in masks.items():
                assert not mask.all()
                assert (weights[target][~mask] == 0).all() and (weights[target][mask] != 0).all()

    def test_the_masks_and_to_rounding_the_weights_are_those_of_one_replica(self, trained, kind, replicas, name):
        (alone,), _ = trained("one_device" if kind == "data_parallel" else "one", 1)
        for facts in trained(kind, replicas)[0]:
            for target, mask in part(facts, f"{name}/masks/").items():
                np.testing.assert_array_equal(mask, alone[f"{name}/masks/{target}"])
            for weight, value in part(facts, f"{name}/weights/").items():
                np.testing.assert_allclose(value, alone[f"{name}/weights/{weight}"], rtol=1e-5, atol=5e-7)


def pair(kind):
    """Kind and replicas of a distribution."""
    marks = [*kind.marks, *([] if kind.id in SHORT else [pytest.mark.thorough])]
    return pytest.param(*kind.values[:2], id=kind.id, marks=marks)


@pytest.mark.parametrize(("kind", "replicas"), [pair(kind) for kind in KINDS if kind.id.startswith("2 ")])
class TestAProcess:
    def test_warnings_come_from_one_process_and_once(self, trained, kind, replicas):
        first, *others = trained(kind, replicas)[0]
        before, after = first["short/notes"]
        assert "has only 9 steps" in before and "ended after 9 steps" in after
        assert not any(len(facts["short/notes"]) for facts in others)

    def test_the_chief_saves_a_plain_keras_file(self, trained, kind, replicas):
        processes, folder = trained(kind, replicas)
        alone = "one_device" if kind == "data_parallel" else "one"
        trained(alone, 1)
        models = [keras.models.load_model(folder / f"{name}.keras") for name in (f"{kind}-{replicas}", f"{alone}-1")]
        configs = [model.get_config() for model in models]
        assert configs[0] == configs[1] and "prunekit" not in str(models[0].to_json())
        slots = [[(slot.path, slot.shape) for slot in model.optimizer.variables] for model in models]
        assert slots[0] == slots[1]
        for name, value in part(processes[0], "adam/weights/").items():
            layer, weight = name.split("/")
            np.testing.assert_array_equal(getattr(models[0].get_layer(layer), weight), value)


@pytest.mark.parametrize(("kind", "error"), [("multi_worker", "unsupported type"), ("mirrored", "merge_call")])
def test_keras_itself_cannot_fit_across_workers_or_accumulate_across_replicas(trained, kind, error):
    # Once it can, `across_replicas`, or the refusal in recipes, has done its duty.
    assert all(error in str(facts["keras_alone"]) for facts in trained(kind, 2)[0])


@needs_jax
@pytest.mark.thorough
def test_the_page_has_a_script_for_jax_that_runs():
    page = (TESTS.parent / "docs" / "distributed.md").read_text()
    (script,) = [block for block in page.split("```")[1::2] if "DataParallel())" in block]
    printed = run("-c", f"{script}\nprint(round(pruning.pruner.sparsity, 2))")
    assert printed.split()[-1] == "0.8"


@pytest.mark.parametrize(
    ("jobs", "task", "expected"),
    [
        (["worker"], ("worker", 0), True),
        (["worker"], ("worker", 1), False),
        (["chief", "worker"], ("chief", 0), True),
        (["chief", "worker"], ("worker", 0), False),
        (["worker", "evaluator"], ("evaluator", 0), False),
        ([], (None, None), True),
    ],
    ids=str,
)
def test_one_process_is_the_chief(jobs, task, expected):
    cluster = types.SimpleNamespace(jobs=jobs)
    resolver = types.SimpleNamespace(task_type=task[0], task_id=task[1], cluster_spec=lambda: cluster)
    assert pk.distribution.is_chief(types.SimpleNamespace(cluster_resolver=resolver)) is expected


def test_a_process_alone_is_the_chief():
    assert pk.distribution.is_chief()
    assert pk.distribution.is_chief(tf.distribute.MirroredStrategy(["CPU:0"]))


def test_without_a_strategy_nothing_is_changed(perceptron):
    before = dict(vars(perceptron))
    with pk.distribution.across_replicas(perceptron):
        assert vars(perceptron) == before


def test_no_batch_is_drawn_ahead_and_the_model_is_given_back(samples):
    drawn = []

    def examples():
        drawn.append("an iteration")
        yield samples

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    spec = (tf.TensorSpec((70, 8)), tf.TensorSpec((70,), "int64"))
    data = tf.data.Dataset.from_generator(examples, output_signature=spec)
    data = data.apply(tf.data.experimental.assert_cardinality(1))
    model.evaluate(data, verbose=0)
    for scope, ahead in ((pk.distribution.across_replicas, 0), (contextlib.nullcontext, 1)):
        drawn.clear()
        with scope(model):
            model.fit(data, epochs=2, shuffle=False, verbose=0)
        assert len(drawn) == 2 + ahead
        assert "_maybe_symbolic_build" not in vars(model)
