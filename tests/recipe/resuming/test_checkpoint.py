"""Runs that were interrupted go on from their checkpoints, and end as those that were not."""

import copy
import dataclasses
import json

import keras
import numpy as np
import pytest
import tiny_recipes
from unfinished_runs import WHOLE, contents, interrupted, names, network

from prunekit.anatomy.files.digests import architecture_digest, model_digest
from prunekit.core.runtime.random_state import random_state
from prunekit.core.runtime.snapshot import Snapshot, read_snapshot, write_snapshot
from prunekit.recipe.datasets.batches import Order
from prunekit.recipe.run import runner
from prunekit.recipe.run.runner import ExpectationError, compress
from prunekit.recipe.state import checkpoint as module
from prunekit.recipe.state.checkpoint import from_plain, plain_fields, start_differences
from prunekit.recipe.state.run_state import RunState
from prunekit.recipe.text.loader import RecipeError

pytestmark = pytest.mark.every_backend


def told(report):
    """A report without what takes its time, and without sizes of files that hold the date."""
    values = tiny_recipes.told(report)
    for row in values["exports"]:
        del row["gzip_bytes"]
    return values


# ---- going on --------------------------------------------------------------------------------------------------------


# After so many ends of epochs and steps.
@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(1, marks=pytest.mark.thorough),
        4,
        *(pytest.param(ends, marks=pytest.mark.thorough) for ends in (6, 9)),
    ],
)
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(pairs, tmp_path, whole, ends):
    work = interrupted(pairs, tmp_path / "run", ends)
    assert names(tmp_path) == ["run.unfinished"]
    result = compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)
    assert told(result.report) == told(whole.report) and not work.exists()
    assert model_digest(result.model) == model_digest(whole.model)


def test_a_run_that_was_interrupted_while_it_trained_with_masks_ends_as_one_that_was_not(pairs, tmp_path):
    steps = [
        {"train": {"epochs": 1}},
        {"prune": {"sparsity": 0.5, "allocation": "uniform", "repair": "none"}},
        {"finetune": {"epochs": 2}},
    ]
    recipe = WHOLE | {"steps": steps}
    work = interrupted(pairs, tmp_path / "run", 4, recipe)
    # On JAX, the optimizer's variables include the masks during the training.
    assert read_snapshot(max(work.glob("checkpoint-*"))).values["epoch"] == 1
    result = compress(recipe, network(), pairs, tmp_path / "run", resume=True)
    assert model_digest(result.model) == model_digest(compress(recipe, network(), pairs).model)


def test_a_torn_checkpoint_is_reported_and_the_one_before_it_used(pairs, tmp_path, whole, unfinished):
    before, newest = sorted(unfinished.glob("checkpoint-*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"{newest.name} is truncated or was modified: {before.name} is used"):
        result = compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)
    assert model_digest(result.model) == model_digest(whole.model)


def test_where_no_checkpoint_is_whole_nothing_is_made_up(pairs, tmp_path, unfinished):
    for file in unfinished.glob("checkpoint-*"):
        file.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="not a snapshot of this version of prunekit: no other is left"),
        pytest.raises(RecipeError, match="are damaged, so nothing can be resumed: start over with --force"),
    ):
        compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)


@pytest.mark.parametrize("name", ["step", "epoch", "history", "record", "random", "files", "optimizer", "callbacks"])
def test_a_checkpoint_that_lacks_something_is_refused_in_one_line(pairs, tmp_path, unfinished, name):
    for file in unfinished.glob("checkpoint-*"):
        found = read_snapshot(file)
        write_snapshot(file, Snapshot(found.values | {name: "something else"}, found.arrays))
    before = contents(unfinished)
    with pytest.raises(RecipeError, match=f"hold no {name} that this version .* start over with --force") as refused:
        compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)
    assert "\n" not in str(refused.value) and contents(unfinished) == before


def test_checkpoints_inside_a_step_may_be_rarer(pairs, tmp_path, monkeypatch):
    standing = []
    monkeypatch.setattr(module.Checkpoints, "write", lambda self, model, one: standing.append((one.step, one.epoch)))
    recipe = WHOLE | {"steps": [{"train": {"epochs": 5}}, {"train": {"epochs": 1}}]}
    compress(recipe, network(), pairs, tmp_path / "run", checkpoint_every=2)
    assert standing == [(0, 2), (0, 4), (1, 0), (2, 0)]
    with pytest.raises(ValueError, match="checkpoint_every must be (at least 1|an int). Received"):
        compress(recipe, network(), pairs, tmp_path / "run", checkpoint_every=0)


def test_resume_begins_where_nothing_was_begun_and_returns_what_is_finished(pairs, tmp_path):
    first = compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)
    before = contents(tmp_path / "run")
    again = compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)
    assert told(again.report) == told(first.report) and contents(tmp_path / "run") == before
    assert model_digest(again.model) == model_digest(first.model)
    other = WHOLE | {"seed": 5}
    with pytest.raises(
        RecipeError, match=r"finished run with other settings: the recipe was edited \(seed: 4 before, 5"
    ):
        compress(other, network(), pairs, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before
    with pytest.raises(RecipeError, match="`resume` needs the output directory of an unfinished run"):
        compress(WHOLE, network(), pairs, resume=True)


def test_a_finished_run_that_failed_its_expectations_fails_them_again(pairs, tmp_path):
    recipe = WHOLE | {"steps": [{"train": {"epochs": 1}}, {"expect": {"metrics": {"accuracy": {"min": 1.0}}}}]}
    for _ in range(2):
        with pytest.raises(ExpectationError, match="accuracy .* is below the expected 1"):
            compress(recipe, network(), pairs, tmp_path / "run", resume=True)


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_what_was_noted_goes_through_json_and_back(pairs, tmp_path):
    record = None

    class Spy(runner.Execution):
        def run(self):
            nonlocal record
            record = super().run()
            return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Execution", Spy)
        compress(WHOLE, network(), pairs, tmp_path / "run")
    values = json.loads(json.dumps(plain_fields(record)))
    again = from_plain(RunState, values, weights_before=record.weights_before, masks=record.masks)
    assert [
        field.name for field in dataclasses.fields(record) if getattr(record, field.name) != getattr(again, field.name)
    ] == []


def test_generators_are_restored_when_the_first_epoch_begins_and_not_later():
    model = network()
    # Keras makes its generator at the first draw.
    keras.random.uniform(())
    standing = module.CheckpointState(random=random_state(model))
    expected = np.random.random(4), keras.ops.convert_to_numpy(keras.random.uniform((4,)))
    callback = module.EpochCheckpoints(Order(4, seed=0), standing, 1, lambda epochs, history: None)
    callback.set_model(model)
    callback.on_epoch_begin(2)
    again = np.random.random(4), keras.ops.convert_to_numpy(keras.random.uniform((4,)))
    np.testing.assert_array_equal(again, expected)
    callback.on_epoch_begin(3)
    assert (np.random.random(4) != expected[0]).all()


def test_an_architecture_is_known_by_what_it_computes_and_not_by_automatic_names():
    first, again = (keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, "relu")]) for _ in range(2))
    assert first.name != again.name and first.layers[0].name != again.layers[0].name
    assert architecture_digest(first) == architecture_digest(again)
    again.layers[0].activation = keras.activations.tanh
    assert architecture_digest(first) != architecture_digest(again)

    class Own(keras.Model):
        def __init__(self, size):
            super().__init__()

    assert architecture_digest(Own(3)) is None or isinstance(architecture_digest(Own(3)), str)


@pytest.mark.one_backend
def test_differences_are_named_at_the_first_place():
    start = {"recipe": {"steps": [{"a": 1}, {"b": [1, 2]}]}, "model": "m", "data": None, "versions": {"x": "1"}}
    assert start_differences(start, start) == []
    # A recipe without a name has that of its file, which may be renamed.
    assert start_differences(start, {**start, "recipe": {**start["recipe"], "name": "new", "description": "?"}}) == []
    now = copy.deepcopy(start) | {"versions": {"x": "2"}, "data": "d"}
    now["recipe"]["steps"][1]["b"][1] = 3
    assert start_differences(start, now) == [
        "the recipe was edited (steps[1].b[1]: 2 before, 3 now)",
        "the data are not what it started from",
        "x was 1 and is 2",
    ]
