"""What a recipe may say."""

import copy
import importlib
import os

import pytest
import yaml
from pydantic import ValidationError

from prunekit.recipe import schema, sources
from prunekit.recipe.loader import RecipeError, dump_recipe, load_recipe
from prunekit.recipe.timing import Duration
from prunekit.sparsity import schedules

BASE = {
    "version": 1,
    "name": "test",
    "model": {"builtin": "digits-cnn"},
    "data": {"builtin": "digits"},
    "compile": {"optimizer": "adam"},
    "steps": [{"train": {"epochs": 2}}],
}
END = {"end": {"epochs": 3}}
SCHEDULES = {
    "polynomial_decay": {"type": "polynomial_decay", "final_sparsity": 0.5, **END},
    "linear": {"type": "linear", "final_sparsity": 0.5, **END},
    "cosine": {"type": "cosine", "final_sparsity": 0.5, **END},
    "exponential": {"type": "exponential", "final_sparsity": 0.5, **END},
    "constant": {"type": "constant", "target_sparsity": 0.5},
    "one_shot": {"type": "one_shot", "sparsity": 0.5, "at": {"epochs": 3}},
    "multi_step": {
        "type": "multi_step",
        "sparsities": [{"at": {"epochs": 1}, "sparsity": 0.2}, {"at": {"epochs": 3}, "sparsity": 0.5}],
    },
}


def recipe(*steps, **changes):
    """BASE with these steps and top-level keys; None takes a key away."""
    document = copy.deepcopy(BASE) | {"steps": list(steps) or BASE["steps"]} | changes
    return {key: value for key, value in document.items() if value is not None}


def prune(schedule=None, **settings):
    return {"prune": {"epochs": 4, "schedule": schedule or SCHEDULES["polynomial_decay"], **settings}}


def one_shot(sparsity=0.5, **settings):
    return {"prune": {"sparsity": sparsity, **settings}}


def export(*formats, **settings):
    return {"export": {"formats": list(formats), **settings}}


def test_every_default_is_filled_in():
    loaded = load_recipe(recipe())
    assert (loaded.seed, loaded.variables, loaded.steps[0].kind) == (0, {}, "train")
    assert loaded.compile.batch_size == 32
    assert loaded.compile.optimizer == sources.Optimizer(name="adam", learning_rate=None)
    assert loaded.data.validation_split == 0.0


def test_a_recipe_cannot_be_changed():
    loaded = load_recipe(recipe())
    with pytest.raises(ValidationError, match="frozen"):
        loaded.seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        loaded.steps[0].train.epochs = 3


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
        step = load_recipe(recipe(prune(SCHEDULES[kind]))).steps[0].prune
        schedule = step.schedule.resolve(steps_per_epoch=10)
        assert type(schedule) is schedules.SCHEDULES[kind]
        assert schedule.final_sparsity == step.final_sparsity == 0.5
        assert schedule.landing_step == (0 if kind == "constant" else 30)

    def test_it_counts_from_the_start_of_its_step(self, kind):
        settings = load_recipe(recipe(prune(SCHEDULES[kind]))).steps[0].prune.schedule
        early, late = settings.resolve(10), settings.resolve(10, offset=500)
        assert late.begin_step == early.begin_step + 500
        assert late.landing_step == early.landing_step + 500

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
            (kind, {"final_sparsity": 0.5, "end": {"steps": 1000}}, {"final_sparsity": 0.5})
            for kind in ("polynomial_decay", "linear", "cosine", "exponential")
        ),
        ("constant", {"target_sparsity": 0.5}, {"target_sparsity": 0.5}),
        ("one_shot", {"sparsity": 0.5}, {"sparsity": 0.5}),
    ],
)
def test_defaults_of_a_schedule_are_those_of_its_class(kind, minimal, arguments):
    settings = load_recipe(recipe(prune({"type": kind, **minimal}))).steps[0].prune.schedule
    assert settings.resolve(1000) == schedules.SCHEDULES[kind](**arguments)


REFUSED = {
    "no steps": (recipe() | {"steps": []}, r"^steps: .*at least 1 item"),
    "steps missing": ({"version": 1}, r"'steps' is missing"),
    "unknown step": (recipe({"quantise": {}}), r"steps\[0\]: unknown key 'quantise'.*train, prune, finetune"),
    "two steps in one": (
        recipe({"train": {"epochs": 1}, "finetune": {"epochs": 1}}),
        "only one of .*train and finetune",
    ),
    "empty step": (recipe({"train": None}), r"steps\[0\]: expected one of train"),
    "step without settings": (recipe("train"), r"steps\[0\]: expected a mapping, such as train: \{epochs: 10\}"),
    "zero epochs": (recipe({"train": {"epochs": 0}}), r"epochs: .*greater than or equal to 1"),
    "half an epoch": (recipe({"train": {"epochs": 1.5}}), r"expected a whole number. Received: 1\.5"),
    "epochs true": (recipe({"train": {"epochs": True}}), r"expected a whole number. Received: true"),
    "epochs as text": (recipe({"train": {"epochs": "3"}}), r"expected a whole number. Received: '3'"),
    "train without data": (recipe(data=None), r"steps\[0\]\.train: this step trains, and the recipe has no 'data'"),
    "train without compile": (recipe(compile=None), r"steps\[0\]\.train: .*no 'compile'"),
    "gradual without compile": (recipe(prune(), compile=None), r"steps\[0\]\.prune: .*no 'compile'"),
    "accuracy without data": (
        recipe(one_shot(), {"expect": {"accuracy": {"min": 0.5}}}, data=None),
        r"steps\[1\]\.expect: this step measures accuracy, and the recipe has no 'data'",
    ),
    "end before begin": (
        recipe(prune({"type": "linear", "final_sparsity": 0.5, "begin": {"epochs": 2}, "end": {"epochs": 1}})),
        r"schedule\.end: the schedule ends before it begins: begin=2 epochs, end=1 epochs",
    ),
    "initial above final": (
        recipe(prune(SCHEDULES["linear"] | {"initial_sparsity": 0.6})),
        r"initial_sparsity: a schedule never gives weights back",
    ),
    "stages that fall": (
        recipe(
            prune(
                {
                    "type": "multi_step",
                    "sparsities": [{"at": {"steps": 1}, "sparsity": 0.5}, {"at": {"steps": 2}, "sparsity": 0.2}],
                }
            )
        ),
        r"sparsities\[1\]\.sparsity: sparsities rise",
    ),
    "a duration of both kinds": (
        recipe(prune(SCHEDULES["linear"] | {"end": {"epochs": 1, "steps": 5}})),
        r"end\.epochs: expected only one of steps, epochs",
    ),
    "a bare duration": (recipe(prune(SCHEDULES["linear"] | {"end": 5})), r"such as \{epochs: 9\} or \{steps: 500\}"),
    "schedule without type": (recipe(prune({"final_sparsity": 0.5})), r"schedule: 'type' is missing. Valid here: poly"),
    "unknown schedule": (recipe(prune({"type": "lineal"})), r"type: unknown type 'lineal'. Did you mean 'linear'"),
    "schedule without epochs": (recipe(prune(epochs=None)), "a schedule needs the step's own 'epochs'"),
    "one-shot with epochs": (recipe(one_shot(epochs=3)), r"epochs: 'sparsity' prunes at once"),
    "one-shot by movement": (
        recipe(one_shot(criterion="movement")),
        r"prune\.criterion: 'movement' looks at how training moves the weights: add 'epochs'",
    ),
    "neither schedule nor sparsity": (recipe({"prune": {"epochs": 3}}), "expected one of schedule, sparsity"),
    "2:4 to 0.9": (recipe(one_shot(0.9, pattern="2:4")), r"prune\.sparsity: 2:4 keeps 2 of every 4.*is 0\.5"),
    "2:4 by erk": (recipe(one_shot(pattern="2:4", allocation="erk")), "allocation: erk gives each weight its own"),
    "4:2": (recipe(one_shot(pattern="4:2")), "needs 0 < n < m"),
    "block 0": (recipe(one_shot(pattern="block:0x4")), "at least one input and one output"),
    "unknown pattern": (recipe(one_shot(pattern="blocks")), "unknown pattern 'blocks'. Valid here: unstructured"),
    "pooling without block": (recipe(one_shot(pooling="max")), "'pooling' goes with a block pattern"),
    "compat with a schedule of ours": (
        recipe(prune(SCHEDULES["linear"], compat="tfmot")),
        r"prune\.schedule\.type: compat: tfmot goes with the schedules poly.*Received: 'linear'",
    ),
    "compat with a criterion of ours": (recipe(one_shot(compat="tfmot", criterion="l2")), r"goes with magnitude.*'l2'"),
    "compat with an allocation": (recipe(one_shot(compat="tfmot", allocation="erk")), r"goes with uniform.*'erk'"),
    "compat with channels": (recipe(one_shot(compat="tfmot", pattern="channel")), r"compat: tfmot goes with unstr"),
    "unknown compat": (recipe(one_shot(compat="tfmod")), r"compat: unknown value 'tfmod'"),
    "bad regular expression": (recipe(one_shot(include=["re:("])), r"include\[0\]: 're:\(' is not a regular expr"),
    "empty pattern": (recipe(one_shot(exclude=[""])), r"exclude\[0\]: .*an empty pattern"),
    "a pattern instead of a list": (recipe(one_shot(exclude="logits")), "exclude: expected a list. Received: 'logits'"),
    "falling finals": (
        recipe(one_shot(0.8), one_shot(0.5)),
        r"steps\[1\]\.prune\.sparsity: pruned weights do not come back: .* to 0\.8\. Received: 0\.5",
    ),
    "unknown format": (recipe(export("tflite")), r"formats\[0\]: unknown value 'tflite'. Did you mean 'litert'"),
    "format twice": (recipe(export("keras", "keras")), r"formats\[1\]: format 'keras' stands here twice"),
    "no format": (recipe({"export": {"formats": []}}), r"formats: .*at least 1 item"),
    "same export name": (recipe(export("keras"), export("keras")), r"steps\[1\]\.export: an earlier export step"),
    "export outside": (recipe(export("keras", name="../x")), "expected a name that can be a file name"),
    "expect of a format never exported": (
        recipe(export("keras"), {"expect": {"bytes": {"litert": {"max": 5}}}}),
        r"bytes\.litert: 'litert' has no size to check.*exported so far: keras",
    ),
    "expect before the export": (
        recipe({"expect": {"bytes": {"keras": {"max": 5}}}}, export("keras")),
        "no export step comes before",
    ),
    "expect of an unknown format": (recipe({"expect": {"bytes": {"kera": {"max": 5}}}}), "Did you mean 'keras'"),
    "expect nothing": (recipe({"expect": {}}), "at least one of accuracy, accuracy_drop, sparsity, bytes"),
    "expect no bytes": (recipe({"expect": {"bytes": {}}}), r"expect\.bytes: expected at least one exported format"),
    "expect a percentage": (recipe({"expect": {"accuracy": {"min": 96}}}), r"Received: 96\. Write 0\.96 for 96 %"),
    "expect sparsity unpruned": (recipe({"expect": {"sparsity": {"min": 0.5}}}), "only after a prune step"),
    "expect a drop unpruned": (recipe({"expect": {"accuracy_drop": {"max": 0.5}}}), "only after a prune step"),
    "empty range": (recipe(one_shot(), {"expect": {"sparsity": {"min": 0.6, "max": 0.5}}}), "expected min <= max"),
    "h5 file": (recipe(model={"file": "x.h5"}), r"model\.file: only \.keras files"),
    "two models": (recipe(model={"file": "x.keras", "builtin": "digits-cnn"}), "only one of .*file and builtin"),
    "no model source": (recipe(model={}), "model: expected one of file, builtin, factory"),
    "factory without function": (recipe(model={"factory": "os.system"}), "expected 'package.module:function'"),
    "factory with a call": (recipe(data={"factory": "os:system('x')"}), "expected 'package.module:function'"),
    "arguments without factory": (
        recipe(model={"builtin": "digits-cnn", "arguments": {"a": 1}}),
        "model.arguments: 'arguments' goes with 'factory'",
    ),
    "argument that is no name": (recipe(model={"factory": "a:b", "arguments": {"a b": 1}}), "keyword argument"),
    "argument that is an object": (
        recipe(model={"factory": "a:b", "arguments": {"a": object()}}),
        "expected text, fin",
    ),
    "path for digits": (recipe(data={"builtin": "digits", "path": "x"}), "leave out 'path'"),
    "scale for digits": (recipe(data={"builtin": "digits", "scale": 2.0}), "leave out 'scale'"),
    "arrays without npz": (recipe(data={"builtin": "digits", "arrays": {"train_inputs": "x"}}), "'npz', which is not"),
    "idx with one file": (recipe(data={"idx": {"train_inputs": "x"}}), r"data\.idx: 'train_labels' is missing"),
    "split of everything": (recipe(data={"builtin": "digits", "validation_split": 1.0}), r"in \[0, 1\)"),
    "limit 0": (recipe(data={"builtin": "digits", "limit": 0}), "greater than or equal to 1"),
    "unknown optimizer": (recipe(compile={"optimizer": "adma"}), "Did you mean 'adam'"),
    "optimizer of the wrong kind": (recipe(compile={"optimizer": 3}), r"such as \{name: adam"),
    "learning rate twice": (
        recipe(compile={"optimizer": {"name": "sgd", "arguments": {"learning_rate": 1.0}}}),
        "stands beside 'name'",
    ),
    "learning rate 0": (recipe({"train": {"epochs": 1, "learning_rate": 0}}), "greater than 0"),
    "unknown loss": (
        recipe(compile={"loss": "sparse_categorical_crosentropy"}),
        "Did you mean 'sparse_categorical_crossentropy'",
    ),
    "logits for mse": (recipe(compile={"loss": "mse", "from_logits": True}), "'mse' has no from_logits"),
    "unknown metric": (recipe(compile={"metrics": ["acuracy"]}), r"metrics\[0\]: .*Did you mean 'accuracy'"),
    "seed below 0": (recipe(seed=-1), "seed: .*greater than or equal to 0"),
    "seed too large": (recipe(seed=2**32), "seed: .*less than or equal to 4294967295"),
    "name with a slash": (recipe(name="a/b"), "expected a name that can be a file name"),
    "number as name": (recipe(name=3), "name: expected text. Received: 3. Put it in quotes"),
    "version 2": (recipe(version=2), "version: this prunekit reads recipes of version 1. Received: 2"),
    "version true": (recipe(version=True), "Received: true"),
    "version 1.0": (recipe(version=1.0), "Received: 1"),
    "other version with other keys": (recipe(version=2, stages=[]), "reads recipes of version 1"),
    "nan": (recipe({"train": {"epochs": 1, "learning_rate": float("nan")}}), "finite number"),
    "key that is a number": (recipe() | {3: 4}, "unknown key 3"),
}


@pytest.mark.parametrize(("document", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_reason(document, message):
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(document)
    assert "\n" not in str(caught.value)


ACCEPTED = {
    "finetune first": recipe({"finetune": {"epochs": 1}}),
    "one-shot without data or compile": recipe(one_shot(), export("litert"), data=None, compile=None),
    "pruning to 0": recipe(one_shot(0)),
    "second step denser on other weights": recipe(one_shot(0.8, include=["a"]), one_shot(0.5, include=["b"])),
    "equal finals": recipe(one_shot(0.8), one_shot(0.8)),
    "1:3": recipe(one_shot(0.6666667, pattern="1:3")),
    "gradual 2:4": recipe(prune(pattern="2:4")),
    "block with pooling": recipe(one_shot(pattern="block:4x1", pooling="max")),
    "by the rules of tfmot": recipe(prune(SCHEDULES["polynomial_decay"], compat="tfmot", pattern="block:4x1")),
    "schedule in steps, end unknown": recipe(prune(SCHEDULES["linear"] | {"end": {"steps": 10**6}})),
    "end with the step": recipe(prune(SCHEDULES["linear"] | {"end": {"epochs": 4}})),
    "two exports": recipe(export("keras", name="dense"), one_shot(), export("keras")),
    "raw and compressed bounds": recipe(export("litert"), {"expect": {"bytes": {"litert": {"gzip_max": 9, "max": 9}}}}),
    "npz": recipe(data={"npz": "x.npz", "arrays": {"train_inputs": "images"}, "scale": 255}),
    "factory": recipe(data={"factory": "my.data:load", "arguments": {"n": [1, {"a": None}]}}),
    "logits": recipe(compile={"from_logits": True, "metrics": []}),
}


@pytest.mark.parametrize("document", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_and_the_same_after_writing_and_reading(document):
    loaded = load_recipe(document)
    assert load_recipe(yaml.safe_load(dump_recipe(loaded))) == loaded


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
    settings = load_recipe(recipe(late)).steps[0].prune.schedule
    assert settings.resolve(1000).landing_step == 1000
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
    ],
)
def test_patterns_are_read(text, kind, numbers):
    assert schema.parse_pattern(text) == (kind, numbers)


@pytest.mark.parametrize("text", ["", "2:4:8", "block:4", "block:4:1", "4x1", "²:4", "2:4\n", "block:-1x1"])
def test_other_patterns_are_refused(text):
    with pytest.raises(ValueError, match="unknown pattern"):
        schema.parse_pattern(text)


class TestAgreementWithTheRestOfPrunekit:
    """The text stage knows names that belong to modules which import Keras; here they are compared."""

    def test_criteria(self):
        scores = importlib.import_module("prunekit.sparsity.scores")
        assert set(_choices(schema.Prune, "criterion")) == set(scores.CRITERIA)

    def test_patterns(self):
        patterns = importlib.import_module("prunekit.sparsity.patterns")
        for text in ("unstructured", "channel", "2:4", "block:4x1"):
            assert str(patterns.get_pattern(text)) == text

    def test_allocations(self):
        allocation = importlib.import_module("prunekit.sparsity.allocation")
        for name in _choices(schema.Prune, "allocation"):
            assert isinstance(allocation.get_allocation(name), allocation.Allocation)

    def test_export_formats(self):
        delivery = importlib.import_module("prunekit.delivery.export")
        assert set(delivery.FORMATS) == set(schema.ExportFormat.__args__)

    def test_built_in_models(self):
        models = importlib.import_module("prunekit.recipe.models")
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
        assert classes - {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"} <= set(sources.OPTIMIZERS.values())
        newer = {"ScheduleFreeAdamW", "Muon"}
        assert set(sources.OPTIMIZERS.values()) - newer <= classes

    def test_losses(self):
        import keras

        for name in sources.LOSSES:
            assert callable(keras.losses.get(name))
        for name in sources.LOGIT_LOSSES.values():
            assert getattr(keras.losses, name)(from_logits=True)

    def test_metrics(self):
        import keras

        for name in sources.METRICS:
            assert name == "accuracy" or callable(keras.metrics.get(name))


def _choices(model, name):
    return model.model_fields[name].annotation.__args__
