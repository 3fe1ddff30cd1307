"""What is known before a weight moves: a run that cannot be is refused, and a plan says what one will do."""

import json
import sys

import keras
import numpy as np
import pytest
import yaml
from backends import BACKEND
from tiny_recipes import COMPILE, ONE_SHOT, WHOLE, prune, recipe, zeros

from prunekit.anatomy.files.digests import model_digest
from prunekit.recipe.run.runner import compress, plan
from prunekit.recipe.text.loader import RecipeError, load_recipe

pytestmark = pytest.mark.every_backend


# ---- refused before a weight moves -----------------------------------------------------------------------------------


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow has all of it")
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            {"export": {"formats": ["keras", "litert"]}},
            "export: the format litert needs the TensorFlow backend. Received",
        ),
        (prune(criterion="movement"), "prune: the criterion movement needs the TensorFlow backend. Received"),
    ],
    ids=["LiteRT", "movement"],
)
def test_what_only_tensorflow_has_is_refused_in_one_line_before_anything_happens(step, message, perceptron, pairs):
    before = model_digest(perceptron)
    with pytest.raises(RecipeError, match=rf"^steps\[1\].{message}: {BACKEND}\. .*KERAS_BACKEND=tensorflow\.$"):
        plan(recipe({"train": {"epochs": 1}}, step), perceptron, pairs)
    assert model_digest(perceptron) == before


REFUSED = {
    "a pattern that matches nothing": (recipe(prune(include=["hiden"])), r"steps\[0\].prune: .*Did you mean 'hidden'"),
    "nothing left to prune": (recipe(prune(exclude=["*"])), r"steps\[0\].prune: .*no weights to prune"),
    "an input length that N:M cannot divide": (
        recipe({"prune": {"sparsity": 2 / 3, "pattern": "1:3"}}),
        r"steps\[0\].prune: .*multiple of 3",
    ),
    "2:4 by erk": (
        recipe({"prune": {"sparsity": 0.5, "pattern": "2:4", "allocation": "erk"}}),
        r"steps\[0\].prune: 2:4 removes the same fraction of every weight.*the allocation ERK",
    ),
    "a schedule longer than its step": (
        recipe({"train": {"epochs": 1}}, prune(schedule={"end": {"steps": 11}})),
        r"steps\[1\].prune: the schedule reaches 0.8 at step 11, and the step trains for 2 epochs of 5 updates, 10 in",
    ),
    "durations that contradict one another": (
        recipe(prune(schedule={"begin": {"steps": 9}, "end": {"epochs": 1.0}})),
        r"steps\[0\].prune: .*begin_step",
    ),
    "optimizer arguments": (
        recipe({"train": {"epochs": 1}}, compile={"optimizer": {"name": "sgd", "arguments": {"momentun": 0.9}}}),
        "compile.optimizer: SGD refuses its arguments: .*momentun",
    ),
    "labels for another loss": (
        recipe({"train": {"epochs": 1}}, compile={"loss": "mse"}),
        r"with loss mse, labels must have the shape .* \(4,\). Received: labels of shape \(\)",
    ),
    "no accuracy to expect": (
        recipe({"expect": {"metrics": {"accuracy": {"min": 0.5}}}}, compile={**COMPILE, "metrics": []}),
        r"steps\[0\].expect: no metric 'accuracy' is measured. Valid here: loss",
    ),
    "metrics that do not fit": (
        recipe({"train": {"epochs": 1}}, compile={**COMPILE, "metrics": ["precision"]}),
        "compile: loss and metrics do not fit the outputs",
    ),
    "movement before any update": (
        recipe(prune(criterion="movement", schedule={"initial_sparsity": 0.5})),
        r"steps\[0\].prune: movement measures how updates.*needs sparsity 0.5 before the first",
    ),
    "an earlier step that is fine": (
        recipe({"prune": {"sparsity": 0.5}}, {"finetune": {"epochs": 1}}, prune(include=["nowhere"])),
        r"steps\[2\].prune: .*nowhere",
    ),
}


@pytest.mark.parametrize(("found", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.one_backend
def test_a_recipe_that_cannot_be_run_is_refused_before_a_weight_moves(tmp_path, perceptron, pairs, found, message):
    before = model_digest(perceptron)
    if BACKEND != "tensorflow" and "movement looks at how" in message:
        message = "needs the TensorFlow backend"
    with pytest.raises(RecipeError, match=message) as raised:
        compress(found, perceptron, pairs, tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert model_digest(perceptron) == before and not list(tmp_path.iterdir())


def with_labels(samples, labels):
    return (samples[0], labels), (samples[0], labels)


@pytest.mark.one_backend
def test_data_that_do_not_fit_the_model_are_refused(perceptron, samples):
    found = recipe({"train": {"epochs": 1}})
    with pytest.raises(
        RecipeError, match=r"has 4 outputs, so labels must be 0 to 3. Received: training labels from 0 to 7"
    ):
        compress(found, perceptron, with_labels(samples, samples[1] + 4 * (samples[1] == 3)))
    with pytest.raises(RecipeError, match="training labels from -1 to 3"):
        compress(found, perceptron, with_labels(samples, samples[1] - (samples[1] == 0)))
    with pytest.raises(RecipeError, match="fractions among the training labels"):
        compress(found, perceptron, with_labels(samples, samples[1] + 0.5))
    with pytest.raises(RecipeError, match="For one-hot labels, write loss: categorical_crossentropy"):
        compress(found, perceptron, with_labels(samples, np.eye(4)[samples[1]]))
    hot = np.eye(4)[samples[1]]
    with pytest.raises(
        RecipeError, match="categorical_crossentropy, labels must be 0 to 1. Received: training labels.* 2"
    ):
        settings = {**COMPILE, "loss": "categorical_crossentropy"}
        compress(recipe({"train": {"epochs": 1}}, compile=settings), perceptron, with_labels(samples, 2 * hot))
    with pytest.raises(RecipeError, match=r"the validation part must have one shape. Received: \(\) and \(4,\)"):
        compress(found, perceptron, (samples, (samples[0], hot)))
    with pytest.raises(RecipeError, match=r"the training and the validation labels must have the same names"):
        compress(found, perceptron, (samples, (samples[0], {"y": samples[1]})))
    with pytest.raises(RecipeError, match=r"does not accept the inputs of given in Python, of shape \(5,\)"):
        compress(found, perceptron, ((samples[0][:, :5], samples[1]), (samples[0][:, :5], samples[1])))


@pytest.mark.one_backend
def test_a_model_with_two_outputs_needs_labels_for_each(samples):
    inputs = keras.Input((8,))
    model = keras.Model(inputs, [keras.layers.Dense(4)(inputs), keras.layers.Dense(2)(inputs)])
    with pytest.raises(
        RecipeError, match="labels must have the names of the outputs .* Received: one array from given"
    ):
        compress(recipe({"train": {"epochs": 1}}), model, (samples, samples))


@pytest.mark.one_backend
def test_missing_parts_are_asked_for(tmp_path, perceptron, pairs):
    with pytest.raises(RecipeError, match="names no model. Pass --model FILE"):
        compress(ONE_SHOT)
    found = load_recipe(recipe({"train": {"epochs": 1}}), data_given=True)
    with pytest.raises(RecipeError, match=r"steps\[0\].train needs data, and the recipe names none"):
        compress(found, perceptron)
    with pytest.raises(RecipeError, match="none.keras does not exist"):
        compress(ONE_SHOT, tmp_path / "none.keras")
    with pytest.raises(TypeError, match="a Keras 3 model or the path of a .keras file. Received: <class 'int'>"):
        compress(ONE_SHOT, 5)
    with pytest.raises(RecipeError, match="gone.npz does not exist"):
        compress(recipe({"train": {"epochs": 1}}, data={"npz": str(tmp_path / "gone.npz")}), perceptron)
    with pytest.raises(RecipeError, match="is not built, and there are no data"):
        compress(ONE_SHOT, keras.Sequential([keras.layers.Dense(3)]))


@pytest.mark.one_backend
def test_exports_without_data_need_inputs_of_known_shape(perceptron):
    found = recipe({"prune": {"sparsity": 0.5}}, {"export": {"formats": ["keras"]}})
    open_ended = keras.Sequential([keras.Input((None, 8)), keras.layers.Dense(4, name="out")])
    with pytest.raises(RecipeError, match=r"steps\[1\].export: .* not fully known: \(None, None, 8\)"):
        compress(found, open_ended)
    assert zeros(open_ended, "out/kernel") == 0


@pytest.mark.one_backend
def test_an_existing_output_is_refused_before_anything_is_read(tmp_path, perceptron):
    (tmp_path / "run").mkdir()
    with pytest.raises(RecipeError, match="exists. Choose another output directory, or replace it with --force"):
        compress(recipe({"prune": {"sparsity": 0.5}}, model={"file": "/nowhere.keras"}), output=tmp_path / "run")


@pytest.mark.one_backend
def test_code_that_a_recipe_names_is_not_imported_without_trust(tmp_path, monkeypatch, pairs):
    (tmp_path / "my_untrusted_models.py").write_text(
        "import keras\n"
        "def build(width):\n"
        "    return keras.Sequential([keras.layers.Dense(width, name='only'), keras.layers.Dense(4, name='out')])\n"
    )
    monkeypatch.chdir(tmp_path)
    source = {"factory": "my_untrusted_models:build", "arguments": {"width": 6}}
    with pytest.raises(RecipeError, match="my_untrusted_models:build.*--trust"):
        compress(recipe({"prune": {"sparsity": 0.5}}, model=source), data=pairs)
    assert "my_untrusted_models" not in sys.modules
    found = recipe({"prune": {"sparsity": 0.5, "allocation": "uniform"}}, {"train": {"epochs": 1}}, model=source)
    first, again = (compress(found, data=pairs, trust=True) for _ in range(2))
    assert zeros(first.model, "only/kernel") == 24
    assert model_digest(first.model) == model_digest(again.model), "a model built by its first batch follows the seed"


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_lists_every_target_and_update_and_moves_no_weight(perceptron, pairs):
    perceptron.compile("sgd", "mse")
    optimizer, before = perceptron.optimizer, model_digest(perceptron)
    found = plan(WHOLE, perceptron, pairs)
    assert found.model == perceptron.name and found.parameters == 212 and found.steps_per_epoch == 5
    assert [step.kind for step in found.steps] == ["train", "prune", "finetune", "export", "expect"]
    assert [step.updates for step in found.steps] == [5, 10, 5, None, None]
    (target,) = found.steps[1].targets
    assert (target.name, target.shape, target.size, target.sparsity, target.pruned) == (
        "hidden/kernel",
        (8, 16),
        128,
        0.8,
        102,
    )
    assert [at for at, _ in found.steps[1].pruning] == [0, 2, 4, 6, 8] and found.steps[1].pruning[-1][1] == 0.8
    assert {item.name for item in found.steps[1].skipped} == {"hidden/bias", "logits/kernel", "logits/bias"}
    assert perceptron.optimizer is optimizer and model_digest(perceptron) == before
    json.dumps(found.to_dict())


@pytest.mark.parametrize(
    "settings",
    [
        {"sparsity": 0.5, "pattern": "2:4"},
        {"sparsity": 0.5, "pattern": "channel"},
        {"sparsity": 0.7, "pattern": "block:4x2:max"},
        {"sparsity": 0.6, "allocation": "erk"},
        {"sparsity": 0.6, "policy": "tfmot"},
        {"sparsity": 0.6, "policy": "tfmot", "pattern": "block:4x2"},
    ],
    ids=str,
)
def test_a_plan_has_the_counts_that_the_run_prunes(perceptron, pairs, settings):
    found = recipe({"prune": settings})
    promised = {target.name: target.pruned for target in plan(found, perceptron, pairs).steps[0].targets}
    compress(found, perceptron, pairs)
    assert promised == {name: zeros(perceptron, name) for name in promised}


def test_a_step_by_the_rules_of_tfmot_updates_masks_as_the_plan_says(perceptron, pairs):
    found = recipe(prune(policy="tfmot", schedule={"frequency": 3}), {"finetune": {"epochs": 1}})
    planned = plan(found, perceptron, pairs).steps[0]
    assert [step for step, _ in planned.pruning] == [3, 6]  # its schedule ends at step 8, which 3 does not divide
    assert "policy tfmot" in planned.text
    result = compress(found, perceptron, pairs)
    assert [event.step for event in result.report.events] == [3, 6]
    removed = {target.name: target.pruned for target in planned.targets}
    assert removed == {name: zeros(result.model, name) for name in removed}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"sparsity": 0.5, "pattern": "block:8x1"}, "at least 2 blocks along each"),
        ({"sparsity": 0.5, "pattern": "channel"}, "supports the patterns unstructured, blocks and m by n. Received"),
        ({"sparsity": 0.5, "criterion": "l2"}, r"supports only the criterion Magnitude\(\)"),
        ({"sparsity": 0.5, "allocation": "erk"}, r"supports only the allocation Uniform\(\)"),
        ({"sparsity": 0.5, "keep_one": False}, "always keeps the largest weight"),
        ({"epochs": 2, "schedule": {"type": "linear", "final_sparsity": 0.5}}, "has two schedules.*LinearDecay"),
    ],
    ids=str,
)
def test_what_tfmot_refuses_is_refused_before_anything_runs(step, message, perceptron, pairs):
    with pytest.raises(RecipeError, match=rf"steps\[0\]\.prune: .*{message}"):
        plan(recipe({"prune": {**step, "policy": "tfmot"}}), perceptron, pairs)


def test_a_plan_for_a_global_allocation_says_that_counts_follow_from_the_weights(perceptron):
    found = plan(recipe({"prune": {"sparsity": 0.5, "criterion": "magnitude", "allocation": "global"}}), perceptron)
    assert "follows from their values" in found.notes[0]
    assert found.steps[0].pruning == ((0, 0.5),)


def test_a_plan_refuses_what_a_run_refuses(perceptron, pairs):
    found, message = REFUSED["a schedule longer than its step"]
    with pytest.raises(RecipeError, match=message):
        plan(found, perceptron, pairs)


@pytest.mark.one_backend
def test_what_a_plan_refuses_has_file_line_and_column(perceptron, pairs, tmp_path):
    file = tmp_path / "mine.yaml"
    found = recipe({"train": {"epochs": 1}}, {"expect": {"metrics": {"foo": {"max": 1}}}})
    file.write_text(yaml.safe_dump(found, sort_keys=False))
    line = 1 + file.read_text().splitlines().index("- expect:")
    with pytest.raises(RecipeError) as refused:
        plan(file, perceptron, pairs)
    assert str(refused.value) == (
        f"{file}:{line + 1}:5: steps[1].expect: no metric 'foo' is measured. Valid here: accuracy, loss."
    )
    # A mapping has no lines.
    with pytest.raises(RecipeError, match=r"^steps\[1\]\.expect: no metric 'foo' is measured"):
        plan(found, perceptron, pairs)


@pytest.mark.one_backend
def test_a_plan_notes_a_bound_in_the_wrong_direction_and_a_schedule_that_is_not_gradual(perceptron, pairs):
    step = prune(schedule={"frequency": 100}, epochs=4)
    found = plan(
        recipe(step, {"expect": {"metrics": {"loss": {"min": 0.1}, "accuracy": {"min": 0.1}}}}), perceptron, pairs
    )
    assert [note.partition(",")[0] for note in found.notes] == [
        "The schedule rises from step 0 to step 8",
        "prune: criterion: magnitude",
        "expect: loss has only the bound 'min'",
    ]
    assert plan(recipe(prune(criterion="magnitude")), perceptron, pairs).notes == ()
