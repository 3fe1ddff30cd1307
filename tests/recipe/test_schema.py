"""What a recipe may say."""

import copy
import importlib
import inspect
import os

import pytest
import yaml
from pydantic import ValidationError
from recipe_documents import SCHEDULES, export, one_shot, prune, recipe

from prunekit.anatomy.records.keras_metrics import KERAS_METRICS
from prunekit.recipe.settings import compile_fields, export_settings, sources, step_settings
from prunekit.recipe.settings.timing import Duration
from prunekit.recipe.text.loader import RecipeError, dump_recipe, load_recipe
from prunekit.sparsity import schedules, shorthands


def test_every_default_is_filled_in():
    loaded = load_recipe(recipe())
    assert (loaded.seed, loaded.variables, loaded.steps[0].kind) == (0, {}, "train")
    assert loaded.compile.batch_size == 32
    assert loaded.compile.optimizer == compile_fields.Optimizer(name="adam", learning_rate=None)
    assert loaded.data.validation is None


def test_a_recipe_cannot_be_changed():
    loaded = load_recipe(recipe())
    with pytest.raises(ValidationError, match="frozen"):
        loaded.seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        loaded.steps[0].settings.epochs = 3


def test_changing_the_mapping_afterwards_does_not_reach_the_recipe():
    document = recipe(model={"factory": "a:b", "arguments": {"sizes": [1, 2]}})
    loaded = load_recipe(document)
    document["model"]["arguments"]["sizes"].append(3)
    assert loaded.model.arguments == {"sizes": [1, 2]}


def test_every_schedule_of_prunekit_has_its_settings():
    assert set(SCHEDULES) == set(schedules.SCHEDULES)


@pytest.mark.parametrize("kind", SCHEDULES)
class TestEverySchedule:
    def test_it_resolves_to_its_class(self, kind):
        step = load_recipe(recipe(prune(SCHEDULES[kind]))).steps[0].settings
        schedule = step.schedule.resolve(steps_per_epoch=10)
        assert type(schedule) is schedules.SCHEDULES[kind]
        assert schedule.final_sparsity == step.final_sparsity == 0.5
        assert schedule.final_step == (0 if kind == "constant" else 30)

    def test_written_out_and_read_again_it_is_the_same(self, kind):
        loaded = load_recipe(recipe(prune(SCHEDULES[kind])))
        assert load_recipe(yaml.safe_load(dump_recipe(loaded))) == loaded

    @pytest.mark.parametrize("percent", [1, 1.0, 50, 90, 100, -0.1])
    def test_a_percentage_is_refused(self, kind, percent):
        changed = copy.deepcopy(SCHEDULES[kind])
        if kind == "multi_step":
            changed["sparsities"][-1]["sparsity"] = percent
        else:
            changed[next(key for key in changed if key.endswith("sparsity"))] = percent
        with pytest.raises(RecipeError, match=r"expected a fraction in \[0, 1\)\. Received: "):
            load_recipe(recipe(prune(changed)))

    def test_a_moment_after_the_last_epoch_of_the_step_is_refused(self, kind):
        changed = copy.deepcopy(SCHEDULES[kind])
        if kind == "multi_step":
            changed["sparsities"][-1]["at"] = {"epochs": 4.5}
        else:
            changed["at" if kind == "one_shot" else "end"] = {"epochs": 4.5}
        with pytest.raises(RecipeError, match=r"trains for 4 epochs, and this comes after 4\.5 epochs"):
            load_recipe(recipe(prune(changed)))

    def test_an_unknown_key_names_the_nearest(self, kind):
        key = next(key for key in SCHEDULES[kind] if key != "type")
        with pytest.raises(RecipeError, match=f"unknown key '{key}s'. Did you mean '{key}'"):
            load_recipe(recipe(prune(SCHEDULES[kind] | {f"{key}s": 1})))


@pytest.mark.parametrize(
    ("kind", "minimal", "arguments"),
    [
        *(
            (kind, {"final_sparsity": 0.5}, {"final_sparsity": 0.5})
            for kind in ("polynomial_decay", "linear", "cosine", "exponential")
        ),
        ("constant", {"target_sparsity": 0.5}, {"target_sparsity": 0.5}),
        ("one_shot", {"sparsity": 0.5}, {"sparsity": 0.5}),
    ],
)
def test_defaults_of_a_schedule_are_those_of_its_class(kind, minimal, arguments):
    settings = load_recipe(recipe(prune({"type": kind, **minimal}))).steps[0].settings.schedule
    assert settings.resolve(1000) == schedules.SCHEDULES[kind](**arguments)


ACCEPTED = {
    "finetune first": recipe({"finetune": {"epochs": 1}}),
    "one-shot without data or compile": recipe(one_shot(), export("litert"), data=None, compile=None),
    "pruning to 0": recipe(one_shot(0)),
    "second step denser on other weights": recipe(one_shot(0.8, include=["a"]), one_shot(0.5, include=["b"])),
    "equal finals": recipe(one_shot(0.8), one_shot(0.8)),
    "1:3": recipe(one_shot(0.6666667, pattern="1:3")),
    "gradual 2:4": recipe(prune(pattern="2:4")),
    "block with pooling": recipe(one_shot(pattern="block:4x1:max")),
    "by the rules of tfmot": recipe(prune(SCHEDULES["polynomial_decay"], policy="tfmot", pattern="block:4x1")),
    "schedule in steps, end unknown": recipe(prune(SCHEDULES["linear"] | {"end": {"steps": 10**6}})),
    "end with the step": recipe(prune(SCHEDULES["linear"] | {"end": {"epochs": 4}})),
    "two exports": recipe(export("keras", name="dense"), one_shot(), export("keras")),
    "raw and compressed bounds": recipe(export("litert"), {"expect": {"bytes": {"litert": {"gzip_max": 9, "max": 9}}}}),
    "npz": recipe(data={"npz": "x.npz", "arrays": {"train_inputs": "images"}, "scale": 255}),
    "images": recipe(data={"images": "photos", "size": [96, 96], "validation": 0.2, "test": 0.1}),
    "images with a test folder": recipe(
        data={"images": "photos", "size": [9, 8], "test": "others", "color_mode": "rgb"}
    ),
    "csv": recipe(data={"csv": "a.csv", "label": "y", "validation": 0.1, "test": 0.2, "delimiter": ";"}),
    "csv with inputs": recipe(
        data={
            "csv": "a.csv",
            "label": ["y", "z"],
            "validation": 0.25,
            "inputs": {"a": ["b", "c"], "d": "e"},
            "preprocessing": {"a": ["Normalization"], "d": [{"StringLookup": None}]},
        }
    ),
    "saved": recipe(data={"tfds_saved": "s", "label": "y", "inputs": ["x"], "preprocessing": "Normalization"}),
    "named arrays": recipe(data={"npz": "a.npz", "arrays": {"train_inputs": {"a": "x"}, "train_labels": {"b": "y"}}}),
    "lock of an older version": recipe(
        data={
            "builtin": "digits",
            "arrays": {
                "train_inputs": "x_train",
                "train_labels": "y_train",
                "test_inputs": "x_test",
                "test_labels": "y_test",
            },
            "arguments": {},
            "validation_split": 0.0,
        }
    ),
    "factory": recipe(data={"factory": "my.data:load", "arguments": {"n": [1, {"a": None}]}}),
    "logits": recipe(compile={"from_logits": True, "metrics": []}),
}


@pytest.mark.parametrize("document", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_and_the_same_after_writing_and_reading(document):
    loaded = load_recipe(document)
    assert load_recipe(yaml.safe_load(dump_recipe(loaded))) == loaded


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ({"builtin": "digits", "validation_split": 0.1}, {"builtin": "digits", "validation": 0.1}),
        ({"npz": "a.npz", "arrays": {"test_targets": "y"}}, {"npz": "a.npz", "arrays": {"test_labels": "y"}}),
    ],
    ids=["validation_split", "targets"],
)
def test_former_keys_of_data_are_read_with_a_warning(former, present):
    with pytest.warns(FutureWarning, match="The key '.*' of a recipe is now '.*'"):
        assert load_recipe(recipe(data=former)) == load_recipe(recipe(data=present))


@pytest.mark.parametrize("kind", ["shrink", "train"])
def test_former_values_are_read_with_a_warning(kind):
    def step(allocation):
        options = {"channels": 0.5, "allocation": allocation}
        return recipe({kind: options if kind == "shrink" else {"epochs": 1, "growing_regularization": options}})

    with pytest.warns(FutureWarning, match="The value 'alike' of a recipe is now 'per_kind'"):
        assert load_recipe(step("alike")) == load_recipe(step("per_kind"))


def test_one_pattern_needs_no_list():
    def steps(names):
        steps = one_shot(include=names), {"quantize": {"exclude": names, "integer_io": "inputs"}}
        return [step.settings.include + step.settings.exclude for step in load_recipe(recipe(*steps)).steps]

    assert steps("hidden*") == steps(["hidden*"]) == [("hidden*",), ("hidden*",)]


def test_the_first_step_that_needs_data_is_named():
    loaded = load_recipe(recipe(one_shot(), prune(), {"finetune": {"epochs": 1}}))
    assert loaded.needs_data() == 1
    assert load_recipe(recipe(one_shot(), export("keras"))).needs_data() is None


def test_data_given_elsewhere_replace_those_of_the_recipe():
    assert load_recipe(recipe(data=None), data_given=True).data is None


def test_durations_round_to_whole_steps():
    assert Duration(epochs=0.5).in_steps(45) == 22
    assert Duration(epochs=2.5).in_steps(100) == 250
    assert Duration(steps=7).in_steps(100) == 7


def test_durations_in_different_units_are_compared_only_with_the_data():
    late = prune(SCHEDULES["linear"] | {"begin": {"steps": 500}, "end": {"epochs": 1}})
    settings = load_recipe(recipe(late)).steps[0].settings.schedule
    assert settings.resolve(1000).final_step == 1000
    with pytest.raises(ValueError, match="begin_step <= end_step"):
        settings.resolve(100)


def test_paths_of_a_mapping_are_relative_to_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(recipe(model={"file": "x.keras"}, data={"npz": "../y.npz"}))
    assert loaded.model.file == str(tmp_path / "x.keras")
    assert loaded.data.npz == str(tmp_path.parent / "y.npz")


def test_a_home_folder_is_found():
    assert load_recipe(recipe(model={"file": "~/x.keras"})).model.file == os.path.expanduser("~/x.keras")


@pytest.mark.parametrize(
    ("text", "kind", "numbers"),
    [
        ("unstructured", "unstructured", ()),
        ("channel", "channel", ()),
        ("2:4", "nm", (2, 4)),
        ("block:16x1", "block", (16, 1)),
        ("block:16x1:max", "block", (16, 1)),
        ("1:123456789", "nm", (1, 123456789)),
    ],
)
def test_patterns_are_read(text, kind, numbers):
    assert step_settings.parse_pattern(text)[:2] == (kind, numbers)


@pytest.mark.parametrize("text", ["", "2:4:8", "block:4", "block:4:1", "4x1", "²:4", "2:4\n", "block:-1x1"])
def test_other_patterns_are_refused(text):
    with pytest.raises(ValueError, match="unknown pattern"):
        step_settings.parse_pattern(text)


class TestAgreementWithTheRestOfPrunekit:
    """The text stage knows names that belong to modules which import Keras; here they are compared."""

    def test_criteria(self):
        scores = importlib.import_module("prunekit.sparsity.scores")
        for name in shorthands.CRITERIA:
            if name != "movement":
                assert step_settings.Prune(sparsity=0.5, criterion=name).criterion == name
            assert isinstance(scores.get_criterion(name), scores.Criterion)
            assert tuple(scores.get_criterion(name).needs) == shorthands.CRITERIA[name].needs

    def test_patterns(self):
        patterns = importlib.import_module("prunekit.sparsity.patterns")
        for text in ("unstructured", "channel", "2:4", "block:4x1", "block:4x2:max", "1:999999999"):
            assert step_settings.parse_pattern(text)
            assert str(patterns.get_pattern(text)) == text

    def test_allocations(self):
        allocation = importlib.import_module("prunekit.sparsity.allocation")
        for name in shorthands.ALLOCATIONS:
            assert step_settings.Prune(sparsity=0.5, allocation=name).allocation == name
            if name == "sensitivity":
                with pytest.raises(ValueError, match="Expected the file of a scan"):
                    allocation.get_allocation(name)
                continue
            assert isinstance(allocation.get_allocation(name), allocation.Allocation)

    def test_export_formats(self):
        delivery = importlib.import_module("prunekit.operations.export")
        assert set(delivery.FORMATS) == set(export_settings.ExportFormat.__args__)

    def test_built_in_models(self):
        models = importlib.import_module("prunekit.recipe.state.models")
        names = sources.ModelSource.model_fields["builtin"].annotation.__args__[0].__args__
        assert set(models.MODELS) == set(names)

    def test_optimizers(self):
        import keras

        classes = {
            name
            for name, value in vars(keras.optimizers).items()
            if isinstance(value, type) and issubclass(value, keras.Optimizer)
        }
        # These wrap other optimizers, or are none themselves.
        known = set(compile_fields.OPTIMIZERS.values())
        assert classes - {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"} <= known
        newer = {"ScheduleFreeAdamW", "Muon"}
        assert known - newer <= classes

    def test_losses(self):
        import keras

        for name in compile_fields.LOSSES:
            assert callable(keras.losses.get(name))
        for name in compile_fields.LOGIT_LOSSES.values():
            assert getattr(keras.losses, name)(from_logits=True)

    def test_metrics(self):
        import keras

        aggregates = {"Mean", "Metric", "MeanMetricWrapper", "Sum"}
        classes = {
            name
            for name, value in vars(keras.metrics).items()
            if isinstance(value, type) and issubclass(value, keras.metrics.Metric)
        }
        assert classes - aggregates <= {metric.kind for metric in KERAS_METRICS.values()}
        for name, metric in KERAS_METRICS.items():
            # Keras reads these names, which are also the names of the results.
            assert metric.needs or callable(keras.metrics.get(name))
            assert [*inspect.signature(getattr(keras.metrics, metric.kind)).parameters][: len(metric.needs)] == [
                *metric.needs
            ]


def _choices(model, name):
    return model.model_fields[name].annotation.__args__


def test_a_step_without_settings_needs_no_mapping():
    assert load_recipe(recipe({"simplify": None})).steps == load_recipe(recipe({"simplify": {}})).steps
