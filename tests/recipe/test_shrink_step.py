"""The recipe step `shrink`: refusals, plan, sizes of what a run writes, masks, rounds, interruptions and repetition."""

import contextlib
import json
import typing

import keras
import numpy as np
import pytest
from tiny_recipes import Stop, prune, recipe, told, zeros

import prunekit as pk
from prunekit.anatomy.channel_normalization import APPROXIMATIONS
from prunekit.anatomy.channel_order import ALLOCATIONS
from prunekit.core.channel_importance import REDUCTIONS
from prunekit.recipe import shrink_settings, shrink_step
from prunekit.recipe.loader import RecipeError, load_recipe
from prunekit.recipe.models import model_digest, weight_arrays
from prunekit.recipe.replicas import Replicas
from prunekit.recipe.run_inputs import RunInputs
from prunekit.recipe.runner import compress, plan, verify
from prunekit.recipe.shrink_settings import Shrink
from prunekit.recipe.workspace import Workspace
from prunekit.techniques.shrink.measured_size import Measure, Measured
from prunekit.techniques.shrink.options import MEASURES, REPAIRS

TRAIN = {"train": {"epochs": 1}}
HALF = {"channels": 0.5}
ROUNDS = {"channels": 0.5, "rounds": 2, "epochs_per_round": 2}


def shrink(**settings):
    return {"shrink": settings or HALF}


def network(width=16):
    keras.utils.set_random_seed(20)
    layers = [
        keras.layers.Dense(width, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.Dense(12, activation="relu", name="second"),
        keras.layers.Dense(4, name="logits"),
    ]
    return keras.Sequential([keras.Input((8,), name="features"), *layers], name="tiny")


def shapes(model):
    return {name: array.shape for name, array in weight_arrays(model).items() if name.endswith("kernel")}


# ---- refusals --------------------------------------------------------------------------------------------------------

TEXT = """\
version: 1
model: {builtin: digits-cnn}
data: {builtin: digits}
compile: {optimizer: adam}
steps:
  - train: {epochs: 1}
  - prune: {sparsity: 0.5, exclude: [logits]}
  - STEP
"""
MISTAKES = {
    "no target": (
        "shrink: {multiple: 8}",
        "8:13",
        "expected one of channels, parameters, macs, bytes, latency. Received: none",
    ),
    "two targets": (
        "shrink: {macs: 0.5, channels: 0.5}",
        "8:20",
        "expected only one of channels, parameters, macs, bytes, latency",
    ),
    "a percentage": ("shrink: {macs: 50}", "8:20", "the share that is left, in (0, 1]. Received: 50. Write 0.5 for 50"),
    "nothing left": ("shrink: {macs: 0}", "8:20", "the share that is left, in (0, 1]"),
    "a percentage of bytes": ("shrink: {bytes: 50}", "8:21", "the share that is left, in (0, 1]. Received: 50."),
    "a key": ("shrink: {mac: 0.5}", "8:14", "unknown key 'mac'. Did you mean 'macs'?"),
    "criterion": ("shrink: {macs: 0.5, criterion: magnitud}", "8:36", "'magnitud'. Did you mean 'magnitude'?"),
    "training": ("shrink: {macs: 0.5, criterion: movement}", "8:36", "'movement' measures how training changes"),
    "rounds of a criterion": ("shrink: {macs: 0.5, criterion: synflow}", "8:36", "'synflow' selects in 100 rounds"),
    "allocation": ("shrink: {macs: 0.5, allocation: globl}", "8:37", "'globl'. Did you mean 'global'?"),
    "rounds": ("shrink: {macs: 0.5, rounds: 3}", "8:33", "3 rounds train after each removal: add 'epochs_per_round'"),
    "learning rate": ("shrink: {macs: 0.5, learning_rate: 0.1}", "8:40", "'learning_rate' needs 'epochs_per_round'"),
    "calibration": ("shrink: {macs: 0.5, calibration: 64}", "8:38", "'calibration' needs 'repair', or a criterion"),
    "another word": (
        "shrink: {channels: zero}",
        "8:24",
        "the share that is left, in (0, 1], or nonzero. Received: 'zero'",
    ),
    "no effect": (
        "shrink: {channels: nonzero, allocation: global}",
        "8:45",
        "'allocation' has no effect on channels: non",
    ),
    "repair": ("shrink: {macs: 0.5, repair: weights}", "8:33", "an earlier step prunes single weights"),
}


@pytest.mark.one_backend
@pytest.mark.parametrize(("step", "place", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_a_recipe_have_line_and_column(tmp_path, run, step, place, message):
    (tmp_path / "r.yaml").write_text(TEXT.replace("STEP", step))
    code, _, error = run("check", "r.yaml")
    assert code == 2 and f"r.yaml:{place}:" in error and message in error


@pytest.mark.one_backend
def test_check_describes_the_step(tmp_path, run):
    step = "shrink: {macs: 0.5, rounds: 3, epochs_per_round: 2, allocation: global, multiple: 8, exclude: [conv_1]}"
    (tmp_path / "r.yaml").write_text(TEXT.replace("STEP", step))
    code, out, _ = run("check", "r.yaml")
    text = "macs to 0.5, in 3 rounds, 2 epochs each, magnitude, global, multiple 8, exclude conv_1"
    assert code == 0 and f"  3. shrink: {text}\n" in out


@pytest.mark.one_backend
def test_a_criterion_of_rounds_is_accepted_with_one_round():
    found = load_recipe(recipe(shrink(channels=0.5, criterion={"type": "synflow", "rounds": 1})), data_given=True)
    assert found.steps[0].settings.criterion.type == "synflow"


@pytest.mark.one_backend
def test_a_criterion_that_reads_data_needs_data():
    model = {"model": {"builtin": "digits-cnn"}}
    with pytest.raises(RecipeError, match="this step reads data, and the recipe has no 'data'"):
        load_recipe(recipe(shrink(channels=0.5, criterion="wanda"), **model))


@pytest.mark.one_backend
def test_groups_of_weights_that_the_smaller_layers_may_not_have_are_refused():
    nm = {"prune": {"sparsity": 0.5, "pattern": "2:4"}}
    with pytest.raises(RecipeError, match=r"steps\[1\]\.prune\.pattern: .*Write multiple: 4 in the shrink step"):
        load_recipe(recipe(shrink(channels=0.5, allocation="global"), nm), data_given=True)
    load_recipe(recipe(shrink(channels=0.5, allocation="global", multiple=4), nm), data_given=True)
    load_recipe(recipe(shrink(channels=0.5), nm), data_given=True)
    with pytest.raises(RecipeError, match="with a target in latency the earlier shrink step may leave any number"):
        load_recipe(recipe(shrink(latency=0.5), nm), data_given=True)
    load_recipe(recipe(shrink(bytes=0.5, multiple=4), nm), data_given=True)


@pytest.mark.one_backend
def test_a_drop_is_measured_after_a_shrink_step_and_a_sparsity_is_not():
    load_recipe(recipe(TRAIN, shrink(), {"expect": {"accuracy_drop": {"max": 0.5}}}), data_given=True)
    with pytest.raises(RecipeError, match="'sparsity' can be measured only after a prune step"):
        load_recipe(recipe(TRAIN, shrink(), {"expect": {"sparsity": {"min": 0.5}}}), data_given=True)


@pytest.mark.one_backend
def test_the_settings_name_what_the_technique_has():
    hints = typing.get_type_hints(Shrink)
    assert MEASURES == shrink_settings.MEASURES
    assert typing.get_args(hints["reduction"]) == tuple(REDUCTIONS)
    assert typing.get_args(hints["allocation"]) == ALLOCATIONS
    assert typing.get_args(typing.get_args(hints["repair"])[0]) == REPAIRS
    assert typing.get_args(typing.get_args(hints["approximate"])[0]) == APPROXIMATIONS


IMPOSSIBLE = {
    "no such layer": ({"channels": 0.5, "include": ["hiden"]}, r"'hiden' in `include` matches .*'hidden'"),
    "no such excluded layer": ({"channels": 0.5, "exclude": ["hiden"]}, r"'hiden' in `exclude` matches"),
    "nothing left to remove": ({"channels": 0.5, "include": ["logits"]}, "no channels that can be removed"),
    "out of reach": ({"parameters": 0.01}, r"parameters=0\.01 cannot be reached .*reachable range"),
    "out of reach in rounds": ({"parameters": 0.01, "rounds": 2, "epochs_per_round": 1}, r"parameters=0\.01 cannot"),
    "minimum": ({"channels": 0.1, "minimum": 6}, "minimum=6"),
    "a statistic": ({"channels": 0.5, "criterion": "batch_normalization_scale"}, "second"),
}


@pytest.mark.parametrize(("settings", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_run_is_refused_before_a_weight_moves(pairs, settings, message):
    model = network()
    before = model_digest(model)
    with pytest.raises(RecipeError, match=rf"^steps\[1\]\.shrink: .*{message}"):
        compress(recipe(TRAIN, shrink(**settings)), model, pairs)
    assert model_digest(model) == before


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_the_plan_shows_the_sizes_and_later_targets_of_the_smaller_model(pairs):
    found = plan(recipe(shrink(), prune()), network(), pairs)
    assert found.steps[0].text == "channels to 0.5, magnitude, uniform: parameters 464 -> 186, MACs 368 -> 136"
    targets = {target.name: target.shape for target in found.steps[1].targets}
    assert targets == {"hidden/kernel": (8, 8), "second/kernel": (8, 6), "logits/kernel": (6, 4)}
    assert found.notes == ("shrink leaves channels: hidden 8 of 16, second 6 of 12.",)


def test_the_plan_notes_sizes_that_follow_from_the_weights(pairs):
    notes = plan(recipe(TRAIN, shrink(**ROUNDS, allocation="global"), prune()), network(), pairs).notes
    assert any("how many channels each layer loses follows from the weights at that time" in note for note in notes)


def test_the_plan_counts_the_epochs_of_the_rounds(pairs):
    step = plan(recipe(shrink(**ROUNDS)), network(), pairs).steps[0]
    assert (step.epochs, step.updates) == (4, 20)
    assert plan(recipe(shrink()), network(), pairs).steps[0].epochs is None


# ---- a whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.every_backend(cases=0)
def test_a_run_ends_with_the_smaller_model_in_every_file(pairs, tmp_path):
    steps = TRAIN, shrink(channels=0.5, repair="weights", calibration=32), {"finetune": {"epochs": 1}}
    later = {"prune": {"sparsity": 0.5}}, {"export": {"formats": ["keras"]}}
    result = compress(recipe(*steps, *later), network(), pairs, tmp_path / "run")
    sizes = {"hidden/kernel": (8, 8), "second/kernel": (8, 6), "logits/kernel": (6, 4)}
    assert shapes(result.model) == sizes
    assert shapes(keras.models.load_model(tmp_path / "run" / "exports" / "model.keras", compile=False)) == sizes
    assert shapes(keras.models.load_model(tmp_path / "run" / "model.keras")) == sizes
    values = json.loads((tmp_path / "run" / "report.json").read_text())
    groups, stops, errors = values["steps"][1]["sections"]
    assert [row[:3] for row in groups["rows"]] == [["hidden", 16, 8], ["second", 12, 6]]
    assert errors["title"] == "Errors of the layers"
    assert result.report.before.parameters == 464 and result.report.after.parameters == 186
    assert zeros(result.model, "hidden/kernel") == 32
    # The optimizer went on with its slots: five updates in each of two epochs.
    assert int(result.model.optimizer.iterations) == 10
    assert "; the model is smaller: 186 of 464 parameters are left." in result.report.verdict()


def test_a_step_tells_the_sizes_at_its_end(pairs):
    told_texts = []
    compress(recipe(shrink()), network(), pairs, progress=lambda item: told_texts.append(item.text))
    assert "parameters 464 -> 186, MACs 368 -> 136" in told_texts


def test_without_data_channels_are_removed(perceptron):
    result = compress({"version": 1, "steps": [shrink()]}, perceptron)
    assert shapes(result.model) == {"hidden/kernel": (8, 8), "logits/kernel": (8, 4)}
    assert result.report.verdict() == "The model is smaller: 108 of 212 parameters are left."
    assert ("Parameters", "108", "50.9 % of 212 before") in result.report.cards()


@pytest.mark.parametrize("measure", ["parameters", "macs"])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_every_allocation_reaches_the_target_by_another_criterion_than_that_of_the_plan(pairs, measure, allocation):
    settings = {measure: 0.5, "allocation": allocation, "criterion": "taylor", "calibration": 64}
    report = compress(recipe(shrink(**settings)), network(width=120), pairs).report
    before, after = report.before, report.after
    share = after.parameters / before.parameters if measure == "parameters" else after.macs / before.macs
    assert abs(share - 0.5) <= 0.01


@pytest.mark.one_backend
@pytest.mark.parametrize(("share", "left"), [(0.5, 0.514), (0.01, 0.035), (1.0, 1.0)])
def test_a_share_that_no_selection_reaches_is_replaced_by_the_nearest(share, left):
    _, report = pk.shrink(network(), macs=share, allocation="global", tolerance=None)
    before, after = report.macs
    assert after / before == pytest.approx(left, abs=0.0005)


# ---- measured targets ------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    """Shares that a measure in the place of LiteRT files found: a third of the size does not shrink."""
    found = []

    @contextlib.contextmanager
    def measure_of(name, model, inputs=None):
        def compare(smaller):
            before, after = (500 + one.count_params() for one in (model, smaller))
            found.append(after / before)
            return Measured(name, before, after, "bytes", after / before, (after / before, after / before), "test")

        yield Measure("parameters", compare) if name in ("bytes", "latency") else None

    monkeypatch.setattr(shrink_step, "measure_of", measure_of)
    monkeypatch.setattr(shrink_step, "check_measure", lambda name: None)
    return found


@pytest.mark.every_backend(cases=0)
@pytest.mark.parametrize("target", ["bytes", "latency"])
def test_a_measured_target_is_reached_planned_and_reported(pairs, measured, target):
    steps = recipe(shrink(**{target: 0.7}), {"prune": {"sparsity": 0.5}})
    found = plan(steps, network(width=60), pairs)
    assert f", {target} to 0." in found.steps[0].text
    assert any(note.startswith(f"shrink to a share of the {target}: the sizes above") for note in found.notes)
    texts = []
    result = compress(steps, network(width=60), pairs, progress=lambda item: texts.append(item.text))
    before, after = result.report.before.parameters, result.report.after.parameters
    assert abs((500 + after) / (500 + before) - 0.7) <= 0.014
    assert f"measuring {target}, 0 of 7" in texts
    section = next(one for one in result.report.steps[0]["sections"] if one["title"] == "Measured size")
    assert section["rows"][0][:4] == [target, "bytes", 500 + before, 500 + after]
    assert zeros(result.model, "hidden/kernel") > 0


def test_rounds_of_a_measured_target_end_at_its_share_of_the_step_s_model(pairs, measured):
    settings = {"bytes": 0.6, "rounds": 2, "epochs_per_round": 1}
    result = compress(recipe(shrink(**settings)), network(width=60), pairs)
    before, after = result.report.before.parameters, result.report.after.parameters
    assert abs((500 + after) / (500 + before) - 0.6) <= 0.02
    rounds, *others = result.report.steps[0]["sections"]
    assert rounds["columns"][-1]["name"] == "bytes left"
    assert [row[-1] for row in rounds["rows"]] == pytest.approx([0.6**0.5, 0.6], abs=0.02)
    assert "Measured size of round 2" in [one["title"] for one in others]


def test_a_measured_target_out_of_reach_is_refused_before_a_weight_moves(pairs, measured):
    with pytest.raises(RecipeError, match=r"^steps\[1\]\.shrink: bytes=0.1 cannot be reached .*reachable range"):
        compress(recipe(TRAIN, shrink(bytes=0.1)), network(), pairs)
    assert measured


def test_a_measured_target_needs_litert_and_one_process(pairs, measured, monkeypatch):
    monkeypatch.setattr(Replicas, "several_processes", True)
    with pytest.raises(ValueError, match="latency is measured by one process"):
        shrink_step._check_measure(Shrink(latency=0.5), plan_inputs(network()))
    monkeypatch.undo()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="bytes is measured on LiteRT files, which need Keras's TensorFlow backend"):
        shrink_step._check_measure(Shrink(bytes=0.5), plan_inputs(network()))


def plan_inputs(model):
    return RunInputs(load_recipe(recipe(shrink()), data_given=True), model, None, None, None)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs a converter")
def test_the_bytes_of_a_run_are_those_of_its_exported_file(pairs, tmp_path):
    steps = shrink(bytes=0.6), {"export": {"formats": ["litert"]}}
    result = compress(recipe(*steps), network(width=200), pairs, tmp_path / "run")
    section = next(one for one in result.report.steps[0]["sections"] if one["title"] == "Measured size")
    before, after = section["rows"][0][2:4]
    assert (tmp_path / "run" / "exports" / "model.tflite").stat().st_size == after
    assert abs(after / before - 0.6) <= 0.012


# ---- masks -----------------------------------------------------------------------------------------------------------


def counts(model):
    return {name: zeros(model, name) for name in ("hidden/kernel", "second/kernel", "logits/kernel")}


@pytest.mark.every_backend(cases=1)
@pytest.mark.parametrize(
    "settings", [{}, {"criterion": "wanda"}, {"repair": "outputs", "epochs_per_round": 1}], ids=str
)
def test_zeros_of_an_earlier_prune_step_hold_through_removal_and_training(pairs, settings):
    seen = []
    inner = Workspace.replace_model

    def replace(self, model, *args):
        former = self.state.masks.pruned
        inner(self, model, *args)
        seen.append((model, {name: int((~mask).sum()) for name, mask in former.items()}))

    steps = {"prune": {"sparsity": 0.75}}, shrink(channels=0.5, **settings), {"finetune": {"epochs": 2}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "replace_model", replace)
        result = compress(recipe(TRAIN, *steps), network(), pairs)
    ((model, masked),) = seen
    assert result.model is model
    assert counts(model) == masked and all(masked.values())
    assert result.report.after.targets == ("hidden/kernel", "second/kernel", "logits/kernel")


def test_a_fit_of_all_weights_is_replaced_by_one_of_the_outputs(pairs):
    result = compress(recipe({"prune": {"sparsity": 0.5}}, shrink(channels=0.5, criterion="wanda")), network(), pairs)
    assert any("repair: outputs in the place of weights" in note for note in result.report.notes)


def test_a_later_prune_step_prunes_further_where_a_mask_was_cut(pairs):
    steps = {"prune": {"sparsity": 0.5}}, shrink(), {"prune": {"sparsity": 0.5}}, {"prune": {"sparsity": 0.75}}
    result = compress(recipe(TRAIN, *steps), network(), pairs)
    assert counts(result.model) == {"hidden/kernel": 48, "second/kernel": 36, "logits/kernel": 18}


def test_zeros_that_the_model_came_with_hold(pairs):
    model = network()
    kernel = model.get_layer("second").kernel
    kernel.assign(np.where(np.arange(192).reshape(16, 12) % 5 == 0, 0, keras.ops.convert_to_numpy(kernel)))
    result = compress(recipe(TRAIN, shrink(), {"finetune": {"epochs": 1}}), model, pairs)
    assert zeros(result.model, "second/kernel") > 0
    assert not result.report.after.targets


def test_masks_of_grouped_convolutions_and_of_replaced_layers_are_cut():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inner = keras.Sequential([layers.Conv2D(8, 3, padding="same", activation="relu", name="one")], name="inner")
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            inner,
            layers.Conv2D(8, 3, groups=2, padding="same", name="grouped"),
            layers.GlobalAveragePooling2D(name="pool"),
            layers.Dense(3, name="logits"),
        ]
    )
    pruned = {"prune": {"sparsity": 0.5, "criterion": "random"}}
    seen = []
    inner_call = Workspace.replace_model

    def replace(self, model, *args):
        seen.append(dict(self.state.masks.pruned))
        inner_call(self, model, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "replace_model", replace)
        result = compress({"version": 1, "seed": 3, "steps": [pruned, shrink()]}, model)
    (masks,) = seen
    weights = weight_arrays(result.model)
    assert len(masks) == 3 and list(masks) == list(result.report.after.targets)
    assert all(np.array_equal(weights[name] != 0, mask) for name, mask in masks.items())


# ---- rounds ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    samples = rng.normal(size=(70, 8)).astype("float32"), rng.integers(0, 4, 70)
    return samples, samples


IN_ROUNDS = recipe(
    TRAIN, {"prune": {"sparsity": 0.5}}, shrink(**ROUNDS, allocation="global"), {"finetune": {"epochs": 1}}
)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    return compress(IN_ROUNDS, network(), data, tmp_path_factory.mktemp("shrink") / "whole")


@pytest.mark.every_backend(cases=0)
def test_rounds_remove_by_the_same_factor_and_train_after_each_removal(whole):
    rounds, groups, *_ = whole.report.steps[2]["sections"]
    # 28 channels: 28 * 0.5 ** (1 / 2) and 28 * 0.5.
    assert [row[:2] for row in rounds["rows"]] == [[1, 20], [2, 14]]
    assert all(0 <= row[4] <= 1 for row in rounds["rows"])
    assert [row[:2] for row in groups["rows"]] == [["hidden", 16], ["second", 12]]
    assert sum(row[2] for row in groups["rows"]) == 14
    assert len(whole.report.steps[2]["history"]["loss"]) == 4
    # An epoch before, four in the rounds, an epoch after.
    assert int(whole.model.optimizer.iterations) == 30


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_rounds_end_at_the_target_of_a_single_removal(pairs, rounds):
    settings = {"parameters": 0.4, "rounds": rounds, "epochs_per_round": 1}
    result = compress(recipe(shrink(**settings)), network(), pairs)
    assert abs(result.report.after.parameters / result.report.before.parameters - 0.4) < 0.02


def test_rounds_of_a_multiple_end_with_multiples(pairs):
    settings = {"channels": 0.5, "multiple": 4, "rounds": 2, "epochs_per_round": 1}
    result = compress(recipe(shrink(**settings)), network(), pairs)
    assert shapes(result.model) == {"hidden/kernel": (8, 8), "second/kernel": (8, 8), "logits/kernel": (8, 4)}


def interrupted(kind, number, data, folder):
    """A run that is interrupted at an end of an epoch or step, or at the start of a training after a removal."""
    inner, calls = Workspace.fit, []

    def fit(self, *args, **kwargs):
        calls.append(None)
        if kind == "training" and len(calls) == number:
            raise KeyboardInterrupt
        return inner(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Workspace, "fit", fit)
        compress(IN_ROUNDS, network(), data, folder, progress=Stop(number) if kind == "end" else None)


# Trainings: the train step, two rounds. Ends: train 1 and 2, prune 3, epochs of the rounds 4 to 7, the step 8, 9.
# The values are the epochs that are left: no checkpoint follows the last epoch of a training.
POINTS = {("training", 2): 5}
MORE = {
    ("end", 6): 2,
    ("training", 3): 3,
    ("end", 3): 5,
    ("end", 4): 4,
    ("end", 5): 4,
    ("end", 7): 2,
    ("end", 8): 2,
    ("end", 9): 1,
}


@pytest.mark.every_backend(cases=1)
@pytest.mark.parametrize(
    ("point", "epochs"), [*POINTS.items(), *(pytest.param(*row, marks=pytest.mark.thorough) for row in MORE.items())]
)
def test_a_run_that_is_interrupted_goes_on_in_its_round_and_ends_with_the_same_bytes(
    data, whole, tmp_path, point, epochs
):
    interrupted(*point, data, tmp_path / "run")
    seen = []
    result = compress(IN_ROUNDS, network(), data, tmp_path / "run", resume=True, progress=seen.append)
    assert sum(item.epoch is not None for item in seen) == epochs
    assert model_digest(result.model) == model_digest(whole.model)
    assert told(result.report) == told(whole.report)
    variables = zip(result.model.optimizer.variables, whole.model.optimizer.variables, strict=True)
    assert all(np.array_equal(*map(keras.ops.convert_to_numpy, pair)) for pair in variables)


def test_a_finished_run_is_verified_and_returned_as_it_ended(data, whole):
    assert verify(whole.directory, model=network(), data=data).identical
    again = compress(IN_ROUNDS, network(), data, whole.directory, resume=True)
    assert model_digest(again.model) == model_digest(whole.model)


# ---- channels that are zero ------------------------------------------------------------------------------------------


def test_whole_channels_are_pruned_and_the_zero_ones_removed(pairs):
    pruned = {"prune": {"sparsity": 0.5, "pattern": "channel", "exclude": ["logits"]}}
    # After a training, biases and normalizations make constants of the channels.
    steps = {"train": {"epochs": 1}}, pruned, shrink(channels="nonzero", epochs_per_round=1)
    result = compress(recipe(*steps), network(), pairs)
    assert shapes(result.model) == {"hidden/kernel": (8, 8), "second/kernel": (8, 6), "logits/kernel": (6, 4)}
    assert result.model.optimizer is not None
    titles = [section["title"] for step in result.report.steps for section in step.get("sections", ())]
    assert "Groups of channels" in titles and "Adjustments" in titles


def test_the_plan_says_that_the_zero_channels_are_known_in_the_run_alone(pairs):
    found = plan(recipe(prune(), shrink(channels="nonzero")), network(), pairs)
    assert found.steps[1].text.startswith("channels that are not zero")
    assert any("shrink, channels nonzero: how many channels" in note for note in found.notes)


def test_an_nm_pattern_after_the_removal_of_zero_channels_needs_a_multiple():
    nm = {"prune": {"sparsity": 0.5, "pattern": "2:4"}}
    with pytest.raises(RecipeError, match=r"with channels: nonzero the earlier .*Write multiple: 4"):
        load_recipe(recipe(shrink(channels="nonzero"), nm), data_given=True)
    load_recipe(recipe(shrink(channels="nonzero", multiple=4), nm), data_given=True)


def test_a_normalization_is_approximated_if_the_step_says_so(pairs):
    keras.utils.set_random_seed(20)
    layers = [keras.layers.Dense(8, name="hidden"), keras.layers.LayerNormalization(name="norm")]
    model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(4, name="logits")])
    with pytest.raises(RecipeError, match="subtracts the mean of all channels"):
        compress(recipe(shrink()), model, pairs)
    result = compress(recipe(shrink(channels=0.5, approximate=["layer_normalization"])), model, pairs)
    assert shapes(result.model) == {"hidden/kernel": (8, 4), "logits/kernel": (4, 4)}


# ---- training before the removal -------------------------------------------------------------------------------------


def test_a_recipe_masks_channel_groups_and_removes_them(pairs):
    steps = [
        {"train": {"epochs": 1, "group_lasso": 0.01}},
        prune(schedule={"final_sparsity": 0.4}, policy="channel_groups"),
        {"shrink": {"channels": "nonzero"}},
        {"finetune": {"epochs": 1}},
    ]
    result = compress(recipe(*steps), network(), pairs)
    assert result.model.count_params() < 0.75 * network().count_params()
    text = str(plan(recipe(*steps), network(), pairs))
    assert "policy channel_groups" in text and "group lasso 0.01" in text


def test_a_group_lasso_without_channels_is_refused_before_any_step(pairs):
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="logits")])
    with pytest.raises(RecipeError, match="group_lasso: .*no channels that can be removed"):
        compress(recipe({"train": {"epochs": 1, "group_lasso": 1.0}}), plain, pairs)


def test_a_run_with_a_group_lasso_resumes_with_the_same_bytes(pairs, tmp_path):
    with_lasso, plain = (recipe({"train": {"epochs": 3, **more}}) for more in ({"group_lasso": 0.5}, {}))
    whole = compress(with_lasso, network(), pairs)
    with pytest.raises(KeyboardInterrupt):
        compress(with_lasso, network(), pairs, tmp_path / "run", progress=Stop(2))
    resumed = compress(with_lasso, network(), pairs, tmp_path / "run", resume=True)
    assert model_digest(resumed.model) == model_digest(whole.model)
    assert model_digest(compress(plain, network(), pairs).model) != model_digest(whole.model)
