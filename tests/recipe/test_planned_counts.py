"""Allocations in recipes: bounds and overrides in files, and the counts that a plan shows."""

import io

import numpy as np
import pytest
from backends import zero_counts
from networks import dense_network
from recipe_documents import one_shot, prune, recipe
from rich.console import Console

import prunekit as pk
from prunekit.recipe.run.plan import plan, show_plan
from prunekit.recipe.steps import planned_counts
from prunekit.recipe.text.loader import RecipeError, dump_recipe, load_recipe

ALLOCATIONS = ["uniform", "global", {"type": "global", "normalization": "l2"}, "erk", "lamp", "layer_error"]


def network():
    """Kernels of 64, 256 and 64 entries with weights of different sizes."""
    found = dense_network(4, one=16, two=16, out=4)
    generator = np.random.default_rng(0)
    for layer, scale in zip(found.layers, (1.0, 0.5, 0.2), strict=True):
        layer.kernel.assign(scale * generator.normal(size=layer.kernel.shape))
    return found


@pytest.fixture
def pairs():
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(64, 4)).astype("float32"), np.arange(64) % 4
    return (x, y), (x[:16], y[:16])


@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=str)
def test_the_plan_has_the_counts_of_the_pruning_with_bounds_and_overrides(pairs, allocation):
    limits = {"bounds": {"one": {"max": 0.3}, "t*": {"min": 0.1, "max": 0.9}}, "overrides": {"out": 0.5}}
    steps = recipe(one_shot(0.6, allocation=allocation, repair="none", **limits), model=None, data=None)
    found = plan(steps, network(), pairs)
    targets = found.steps[0].targets
    model = network()
    pk.compress(steps, model, pairs)
    assert [target.pruned for target in targets] == zero_counts(model)
    assert sum(zero_counts(model)) == round(0.6 * 384) and zero_counts(model)[0] <= 19 and zero_counts(model)[2] == 32
    assert [(t.minimum, t.maximum, t.override) for t in targets] == [
        (0, 0.3, None),
        (0.1, 0.9, None),
        (None, None, 0.5),
    ]
    weight_free = allocation in ("uniform", "erk")
    assert any("the weights that the model has now" in note for note in found.notes) != weight_free


def test_the_plan_counts_the_zeros_that_the_model_has(pairs):
    model = network()
    # The largest weights of the model, which a global threshold would keep.
    kernel = model.layers[0].kernel
    kernel.assign(np.where(np.arange(64).reshape(4, 16) < 40, 0.0, 9.0))
    model.layers[1].kernel.assign(np.zeros((16, 16)) + 1.0)
    steps = recipe(one_shot(0.3, allocation="lamp", criterion={"type": "random", "seed": 1}), model=None, data=None)
    found = plan(steps, model, pairs)
    pk.compress(steps, model, pairs)
    assert [target.pruned for target in found.steps[0].targets] == zero_counts(model)


def test_the_plan_is_printed_with_the_limits(pairs):
    steps = recipe(
        one_shot(0.6, allocation="global", bounds={"one": {"max": 0.3}, "two": {"min": 0.1}}, overrides={"out": 0.5}),
        model=None,
        data=None,
    )
    told = io.StringIO()
    show_plan(plan(steps, network(), pairs), Console(file=told, width=120))
    text = told.getvalue()
    for words in ("limits", "at most 0.3", "at least 0.1", "set to 0.5", "one at max. 0.3", "out to 0.5"):
        assert words in text


@pytest.mark.parametrize(
    ("updates", "line"),
    [
        (1, "1 mask update, at step (sparsity): 0 (0.6)"),
        (12, "12 mask updates, at step (sparsity): " + ", ".join(f"{at} (0.6)" for at in range(12))),
        (
            2_500,
            "2,500 mask updates, at step (sparsity): "
            + ", ".join([f"{at} (0.6)" for at in range(6)] + ["..."] + [f"{at} (0.6)" for at in range(2494, 2500)]),
        ),
    ],
)
def test_of_many_mask_updates_the_first_and_the_last_are_printed(pairs, updates, line):
    schedule = {"type": "constant", "target_sparsity": 0.6, "end": {"steps": updates - 1}, "frequency": 1}
    steps = recipe(prune(epochs=1250, schedule=schedule), model=None, data=None)
    told = io.StringIO()
    show_plan(plan(steps, network(), pairs), Console(file=told, width=10_000))
    assert f"   {line}\n" in told.getvalue()


def test_counts_that_need_the_training_are_an_even_share_and_the_note_names_the_statistic(pairs):
    steps = recipe(
        prune(criterion="movement", allocation="global", bounds={"one": {"max": 0.25}}), model=None, data=None
    )
    found = plan(steps, network(), pairs)
    assert any("does not know: the statistic movement is measured during the training" in note for note in found.notes)
    assert found.steps[0].targets[0].pruned == 16, "an even share within the bounds"


def test_a_large_model_is_not_run_over_data_for_a_plan(pairs, monkeypatch):
    monkeypatch.setattr(planned_counts, "MOST_WEIGHTS_WITH_DATA", 100)
    steps = recipe(one_shot(0.6, allocation="layer_error"), model=None, data=None)
    found = plan(steps, network(), pairs)
    assert any("which a plan does for up to 100 weights" in note for note in found.notes)


def test_mistakes_are_told_with_line_and_column(tmp_path):
    path = tmp_path / "r.yaml"
    for text, message in (
        (
            "bounds: {one: {max: 0.3, min: 0.5}}",
            r"r.yaml:3:48: .*bounds.one.max: expected min <= max. Received: 0.5 and",
        ),
        ("bounds: {one: {most: 0.3}}", r"r.yaml:3:43: .*bounds.one: unknown key 'most'. Valid here: min, max"),
        ("bounds: {one: {max: 30}}", r"r.yaml:3:48: .*Write 0.3 for 30 %"),
        ("bounds: {one: {}}", r"r.yaml:3:\d+: .*bounds.one: .*min"),
        ("pattern: '2:4', bounds: {one: {max: 0.3}}", r"r.yaml:3:.*bounds: 2:4 gives every weight the same sparsity"),
        ("pattern: '2:4', overrides: {one: 0.3}", r"r.yaml:3:.*overrides: 2:4 gives every weight the same sparsity"),
    ):
        path.write_text(f"version: 1\nsteps:\n  - prune: {{sparsity: 0.5, {text}}}\n")
        with pytest.raises(RecipeError, match=message):
            load_recipe(path, data_given=True)
    path.write_text("version: 1\nsteps:\n  - prune: {sparsity: 0.5, policy: tfmot, bounds: {one: {max: 0.3}}}\n")
    with pytest.raises(RecipeError, match=r"steps\[0\].prune: .*prunes all weights to one sparsity. Received: bounds"):
        plan(path, network())
    path.write_text("version: 1\nsteps:\n  - prune: {sparsity: 0.5, bounds: {five: {max: 0.3}}}\n")
    with pytest.raises(RecipeError, match=r"steps\[0\].prune: .*pattern 'five' in `bounds` matches no layer"):
        plan(path, network())
    path.write_text("version: 1\nsteps:\n  - prune: {sparsity: 0.5, bounds: {'*': {max: 0.25}}}\n")
    with pytest.raises(RecipeError, match=r"steps\[0\].prune: .*from 0 to 0.25. Received: 0.5"):
        plan(path, network())


def test_a_locked_recipe_keeps_the_bounds(tmp_path):
    loaded = load_recipe(recipe(one_shot(0.5, bounds={"one": {"max": 0.3}}), model=None, data=None), data_given=True)
    (tmp_path / "again.yaml").write_text(dump_recipe(loaded))
    assert load_recipe(tmp_path / "again.yaml", data_given=True) == loaded
