"""Gradual N:M: after each update every group keeps the same number of weights; the masks only shrink."""

import keras
import numpy as np
import pytest
from tiny_recipes import recipe

import prunekit as pk
from prunekit.anatomy.files.digests import model_digest, weight_arrays
from prunekit.recipe.run.runner import compress, plan
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.policies.structure_decay import GroupSteps
from prunekit.techniques.pruning.training.targeting import resolved_targets

SCHEDULE = pk.schedules.LinearDecay(final_sparsity=0.75, begin_step=0, end_step=10, frequency=1)
# 0.075 per step, in groups of eight: eighths rounded down.
KEPT = [8, 8, 7, 7, 6, 5, 5, 4, 4, 3, 2]
OPTIONS = {"pattern": "2:8", "policy": "structure_decay", "include": ["hidden"]}


def plainly(weight, mask, kept):
    """The mask that keeps the `kept` largest of every eight inputs, among those that are left."""
    size = np.where(mask, np.abs(weight), -1).reshape(-1, 8, weight.shape[-1])
    rank = np.argsort(np.argsort(-size, axis=1, kind="stable"), axis=1)
    return (rank < kept).reshape(weight.shape)


@pytest.mark.every_backend(cases=1)
def test_every_group_keeps_the_same_number_at_every_step(compiled, samples):
    seen = []
    pruning = pk.PruningCallback(SCHEDULE, **OPTIONS)

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(pruning.pruner.masks["hidden/kernel"])

    compiled.fit(*samples, batch_size=16, epochs=2, verbose=0, callbacks=[pruning, Look()])
    assert [set((mask.reshape(-1, 8, 16)).sum(axis=1).ravel()) for mask in seen] == [{k} for k in KEPT[1:]]
    assert all((later <= earlier).all() for earlier, later in zip(seen[:-1], seen[1:], strict=True))
    asked = {event.step: event.asked for event in pruning.pruner.events}
    assert all(value == 1 - KEPT[step] / 8 for step, value in asked.items()) and asked[10] == 0.75
    assert pruning.pruner.sparsity == 0.75


def test_each_mask_is_the_plain_one(perceptron):
    kernel, wanted = perceptron.layers[0].kernel, np.ones((8, 16), bool)
    found = resolved_targets(perceptron, SCHEDULE, PruningOptions(**OPTIONS), training=True)
    assert isinstance(found.policy, pk.policies.StructureDecay)
    for step in (0, 2, 4, 7, 10):
        weight = np.random.default_rng(step).normal(size=(8, 16)).astype("float32")
        kernel.assign(np.where(wanted, weight, 0))
        masks = found.calculator.choose(found.schedule(step), [keras.ops.convert_to_tensor(wanted)]).masks
        wanted = plainly(np.where(wanted, weight, 0), wanted, KEPT[step])
        assert np.array_equal(np.array(masks[0]), wanted)


def test_sparsities_are_rounded_down_to_multiples_of_a_group():
    steps = GroupSteps(SCHEDULE, 8)
    assert [round(8 * (1 - steps(step)), 6) for step in range(11)] == KEPT
    assert steps.update_steps(20) == SCHEDULE.update_steps(20) and steps(10) == 0.75


def test_a_pattern_that_is_not_nm_is_refused(perceptron, pairs):
    with pytest.raises(ValueError, match='"structure_decay" tightens an N:M pattern. Received: pattern=unstructured'):
        pk.Pruner(
            perceptron, SCHEDULE, optimizer=keras.optimizers.SGD(), policy="structure_decay", allocation="uniform"
        )
    step = {"prune": {"sparsity": 0.5, "policy": "structure_decay", "allocation": "uniform"}}
    with pytest.raises(ValueError, match=r"steps\[0\].prune: .*tightens an N:M pattern"):
        plan(recipe(step), perceptron, pairs)


def test_at_once_it_is_the_pattern_itself(perceptron):
    report = pk.prune(perceptron, 0.75, **OPTIONS)
    assert {row.name: row.pattern for row in report.weights}["hidden/kernel"] == "2:8"


RISING = {"type": "linear", "final_sparsity": 0.75, "end": {"steps": 10}, "frequency": 1}
STEPS = recipe({"prune": {"epochs": 3, "schedule": RISING, **OPTIONS, "allocation": "uniform"}})


def test_the_plan_of_a_recipe_lists_the_sparsities_of_the_patterns(perceptron, pairs):
    (planned,) = plan(STEPS, perceptron, pairs).steps
    assert [round(8 * (1 - sparsity)) for _, sparsity in planned.pruning] == KEPT


@pytest.mark.thorough
@pytest.mark.every_backend
def test_a_recipe_resumes(perceptron, pairs, tmp_path):
    start = perceptron.get_weights()

    def stop(item):
        if item.epoch == 1:
            raise KeyboardInterrupt

    whole = model_digest(compress(STEPS, perceptron, pairs, tmp_path / "whole").model)
    fresh = [keras.models.clone_model(perceptron) for _ in range(2)]
    for model in fresh:
        model.set_weights(start)
    with pytest.raises(KeyboardInterrupt):
        compress(STEPS, fresh[0], pairs, tmp_path / "run", progress=stop)
    result = compress(STEPS, fresh[1], pairs, tmp_path / "run", resume=True)
    assert model_digest(result.model) == whole
    kernel = weight_arrays(result.model)["hidden/kernel"]
    assert ((kernel.reshape(-1, 8, 16) != 0).sum(axis=1) == 2).all()
