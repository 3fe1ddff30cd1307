"""`distill` in the steps of a recipe: the teacher, what is refused, and interrupted runs."""

import dataclasses

import keras
import numpy as np
import pytest
from quantized_training import CLASSES, X, Y, network

import prunekit as pk
from prunekit.recipe.run.plan import plan
from prunekit.recipe.settings.distill_settings import Distill
from prunekit.recipe.state.training import Training
from prunekit.recipe.text.loader import RecipeError, load_recipe
from prunekit.techniques.distill import training as training_module
from prunekit.techniques.distill.options import DistillationOptions

DATA = ((X[:128], Y[:128]), (X[128:192], Y[128:192]))
SCHEDULE = {"type": "polynomial_decay", "final_sparsity": 0.6, "frequency": 1}
PRUNE = {"prune": {"epochs": 2, "schedule": SCHEDULE, "allocation": "uniform"}}


def recipe(*steps):
    compiled = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "batch_size": 32}
    return {"version": 1, "compile": compiled, "steps": list(steps)}


def distilled(kind, value=True, **settings):
    return {kind: {"epochs": 2, "distill": value, **settings}}


@pytest.fixture
def teachers(monkeypatch):
    """The weights of the teachers of a run."""
    found = []
    check = training_module.check_teacher
    monkeypatch.setattr(
        training_module, "check_teacher", lambda one, model: (found.append(one.get_weights()), check(one, model))
    )
    return found


def test_fields_have_the_names_and_defaults_of_the_options():
    fields, options = Distill.model_fields, {one.name: one for one in dataclasses.fields(DistillationOptions)}
    assert set(fields) == {"teacher", *options}
    for name, one in options.items():
        assert fields[name].default == one.default or name == "features"


def test_the_teacher_is_the_model_before_its_first_compression(teachers):
    model = network(compiled=False)
    steps = [
        {"train": {"epochs": 1}},
        {"prune": {**PRUNE["prune"], "distill": True}},
        distilled("finetune"),
        distilled("cluster", clusters=8),
        distilled("quantize", {"loss": "dist"}),
    ]
    result = pk.compress(recipe(*steps), model, DATA)
    trained = network(compiled=False)
    pk.compress(recipe(steps[0]), trained, DATA)
    assert len(teachers) == 4
    for weights in teachers:
        for one, two in zip(weights, trained.get_weights(), strict=True):
            np.testing.assert_array_equal(one, two)
    titles = [section["title"] for row in result.report.to_dict()["steps"] for section in row.get("sections", ())]
    assert titles.count("Distillation") == 4


def test_a_teacher_may_come_from_a_file(tmp_path, teachers):
    teacher = network(compiled=False)
    teacher.save(tmp_path / "teacher.keras")
    pk.compress(recipe(distilled("train", {"teacher": str(tmp_path / "teacher.keras")}, epochs=1)), network(), DATA)
    for one, two in zip(teachers[0], teacher.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_the_path_of_a_teacher_is_that_beside_the_recipe(tmp_path):
    text = "version: 1\ncompile: {optimizer: adam}\nsteps:\n  - train: {epochs: 1, distill: {teacher: t.keras}}\n"
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    found = load_recipe(tmp_path / "recipe.yaml", data_given=True)
    assert found.steps[0].settings.distill.teacher == str(tmp_path / "t.keras")


@pytest.mark.parametrize("layers", [["conv", "norm"], {"conv": "conv"}, "conv"], ids=str)
def test_inner_layers_are_named_as_in_python(layers):
    written = recipe(distilled("train", {"teacher": "t.keras", "features": layers}))
    (step,) = load_recipe(written, data_given=True).steps
    given = {"conv": "conv"} if layers != ["conv", "norm"] else {"conv": "conv", "norm": "norm"}
    assert step.settings.distill.features == given


def test_false_is_no_distillation():
    found = load_recipe(recipe(distilled("train", False), distilled("finetune", None)), data_given=True)
    assert [step.settings.distill for step in found.steps] == [None, None]


def test_a_plan_names_the_teacher():
    found = plan(recipe({"prune": {**PRUNE["prune"], "distill": {"loss": "dkd"}}}), network(compiled=False), DATA)
    assert "distilled from the model before (dkd)" in found.steps[0].text


REFUSED = {
    "a number": (
        distilled("train", 3),
        "train.distill: expected true, or a mapping such as {weight: 0.9}. Received: 3",
    ),
    "an unknown loss": (distilled("train", {"teacher": "t.keras", "loss": "kll"}), "distill.loss: .*kl"),
    "an unknown key": (distilled("train", {"temprature": 2}), "distill.* Did you mean 'temperature'"),
    "a share in percent": (distilled("train", {"weight": 90}), "Write 0.9 for 90 %"),
    "a teacher of another format": (distilled("train", {"teacher": "t.h5"}), "distill.teacher: only .keras files"),
    "no model before": (distilled("train"), "no step before this one compresses it"),
    "pruning at once": ({"prune": {"sparsity": 0.5, "distill": True}}, "write epochs, too"),
    "rounding": ({"quantize": {"bits": 8, "distill": True}}, "write epochs, too"),
    "layers that are no names": (distilled("train", {"features": [1]}), "expected names of layers"),
    "clusters without a training": ({"cluster": {"clusters": 4, "distill": True}}, "write epochs, too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_refused_with_their_place(name):
    step, match = REFUSED[name]
    with pytest.raises(RecipeError, match=match):
        load_recipe(recipe(step), data_given=True)


def test_a_mistake_in_a_file_has_line_and_column(tmp_path):
    lines = ["version: 1", "compile: {optimizer: adam}", "steps:", "  - train:", "      epochs: 1", "      distill: 3"]
    (tmp_path / "recipe.yaml").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "recipe.yaml", data_given=True)
    assert "recipe.yaml:6:16" in str(error.value)


def wrong_teacher(folder):
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(CLASSES + 1)])
    model.save(folder / "t.keras")
    return str(folder / "t.keras")


def test_a_teacher_that_does_not_fit_is_refused_before_a_weight_changes(tmp_path):
    model = network(compiled=False)
    before = model.get_weights()
    wrong = recipe({"train": {"epochs": 1}}, distilled("finetune", {"teacher": wrong_teacher(tmp_path)}))
    with pytest.raises(RecipeError, match=r"steps\[1\].finetune: distill: A teacher has outputs of the same shapes"):
        pk.compress(wrong, model, DATA)
    missing = recipe(distilled("train", {"teacher": str(tmp_path / "none.keras")}))
    with pytest.raises(RecipeError, match="does not exist"):
        pk.compress(missing, model, DATA)
    unknown = recipe({"prune": {**PRUNE["prune"], "distill": {"features": ["convv"]}}})
    with pytest.raises(RecipeError, match="Did you mean 'conv'"):
        pk.compress(unknown, model, DATA)
    for one, two in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, two)


class Interrupted(Exception):
    pass


INTERRUPTED = [
    {"train": {"epochs": 1}},
    {"prune": {**PRUNE["prune"], "epochs": 3, "distill": True}},
    distilled("finetune", {"loss": "dist"}),
    distilled("cluster", clusters=8),
    distilled("quantize", epochs=3),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of a run that was never interrupted."""
    model = network(compiled=False)
    pk.compress(recipe(*INTERRUPTED), model, DATA, output=tmp_path_factory.mktemp("whole") / "run")
    return model.get_weights()


# Numbers of checkpoints inside steps.
@pytest.mark.parametrize(
    "after", [2, pytest.param(3, marks=pytest.mark.thorough), 4, pytest.param(6, marks=pytest.mark.thorough)]
)
def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, monkeypatch, whole, after):
    saved, count = Training.save_epoch, []

    def save_epoch(self, *args, **kwargs):
        saved(self, *args, **kwargs)
        count.append(1)
        if len(count) == after:
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(Training, "save_epoch", save_epoch)
        with pytest.raises(Interrupted):
            pk.compress(recipe(*INTERRUPTED), network(compiled=False), DATA, output=tmp_path / "cut")
    resumed = network(compiled=False)
    pk.compress(recipe(*INTERRUPTED), resumed, DATA, output=tmp_path / "cut", resume=True)
    for one, two in zip(resumed.get_weights(), whole, strict=True):
        np.testing.assert_array_equal(one, two)
