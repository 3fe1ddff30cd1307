"""The recipe step `shrink`: refusals, plan, sizes of what a run writes, masks, rounds, interruptions and repetition."""

import json
import typing

import keras
import numpy as np
import pytest
from networks import sequential
from shrink_recipes import network, shapes, shrink
from tiny_recipes import Stop, one_shot, prune, recipe, resumed, told, zeros

import prunekit as pk
from prunekit.anatomy.channels.channel_normalization import APPROXIMATIONS
from prunekit.anatomy.channels.channel_order import ALLOCATIONS
from prunekit.anatomy.files.digests import model_digest, weight_arrays
from prunekit.core.data import synthetic_inputs
from prunekit.core.statistics.channel_importance import REDUCTIONS
from prunekit.delivery.reports.report_sections import cards
from prunekit.recipe.run.runner import compress, plan, verify
from prunekit.recipe.settings.shrink_settings import Shrink
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.text.loader import RecipeError, load_recipe
from prunekit.sparsity.shorthands import Reduction

TRAIN = {"train": {"epochs": 1}}
ROUNDS = {"channels": 0.5, "rounds": 2, "epochs_per_round": 2}


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
    "examples": (
        "shrink: {macs: 0.5, repair: none, examples: 64}",
        "8:49",
        "'examples' needs 'repair', or a criterion",
    ),
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
    "no repair": ("shrink: {channels: nonzero, memory: 5}", "8:41", "'memory' has no effect on channels: non"),
}


@pytest.mark.one_backend
@pytest.mark.parametrize(("step", "place", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_a_recipe_have_line_and_column(tmp_path, run, step, place, message):
    (tmp_path / "r.yaml").write_text(TEXT.replace("STEP", step))
    code, _, error = run("check", "r.yaml")
    assert code == 2 and f"r.yaml:{place}:" in error and message in error


@pytest.mark.one_backend
@pytest.mark.parametrize("words", ["check r.yaml --plan", "compress r.yaml -o new"])
def test_mistakes_that_the_model_shows_have_line_and_column(tmp_path, run, words):
    (tmp_path / "r.yaml").write_text(TEXT.replace("STEP", "shrink: {macs: 0.5, exclude: conv1}"))
    code, _, error = run(*words.split())
    assert code == 2 and "error: r.yaml:8:13: steps[2].shrink: " in error and "'conv1' in `exclude` matches no" in error


@pytest.mark.one_backend
def test_check_describes_the_step(tmp_path, run):
    step = "shrink: {macs: 0.5, rounds: 3, epochs_per_round: 2, allocation: global, multiple: 8, exclude: [conv_1]}"
    (tmp_path / "r.yaml").write_text(TEXT.replace("STEP", step))
    code, out, _ = run("check", "r.yaml")
    text = "macs to 0.5, in 3 rounds, 2 epochs each, auto, global, multiple 8, exclude conv_1"
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
    nm = one_shot(0.5, pattern="2:4")
    with pytest.raises(RecipeError, match=r"steps\[1\]\.prune\.pattern: .*Write multiple: 4 in the shrink step"):
        load_recipe(recipe(shrink(channels=0.5, allocation="global"), nm), data_given=True)
    load_recipe(recipe(shrink(channels=0.5, allocation="global", multiple=4), nm), data_given=True)
    load_recipe(recipe(shrink(channels=0.5, allocation="uniform"), nm), data_given=True)
    with pytest.raises(RecipeError, match="with allocation: auto the earlier shrink step may leave any number"):
        load_recipe(recipe(shrink(channels=0.5), nm), data_given=True)
    with pytest.raises(RecipeError, match="with a target in latency the earlier shrink step may leave any number"):
        load_recipe(recipe(shrink(latency=0.5), nm), data_given=True)
    load_recipe(recipe(shrink(bytes=0.5, multiple=4), nm), data_given=True)


@pytest.mark.one_backend
def test_a_drop_is_measured_after_a_shrink_step_and_a_sparsity_is_not():
    load_recipe(recipe(TRAIN, shrink(), {"expect": {"drop": {"accuracy": 0.5}}}), data_given=True)
    with pytest.raises(RecipeError, match="'sparsity' can be measured only after a prune step"):
        load_recipe(recipe(TRAIN, shrink(), {"expect": {"sparsity": {"min": 0.5}}}), data_given=True)


@pytest.mark.one_backend
def test_the_settings_name_what_the_technique_has():
    hints = typing.get_type_hints(Shrink)
    assert typing.get_args(Reduction) == tuple(REDUCTIONS)
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
    assert found.steps[0].text == "channels to 0.5, auto, auto: parameters 464 -> 186, MACs 368 -> 136"
    targets = {target.name: target.shape for target in found.steps[1].targets}
    assert targets == {"hidden/kernel": (8, 8), "second/kernel": (8, 6), "logits/kernel": (6, 4)}
    assert found.notes[0] == "shrink leaves channels: hidden 8 of 16, second 6 of 12."


TRIED = "criterion: l2 or output_error, whichever leaves the outputs nearest"
BOTH = "allocation: uniform or global, whichever leaves the outputs nearest"
UNIFORM = "allocation: uniform, since nothing is repaired"


@pytest.mark.parametrize(
    ("settings", "data", "expected"),
    [
        ({}, True, [TRIED, BOTH]),
        ({}, False, [TRIED, BOTH]),
        ({"repair": "none"}, True, ["criterion: l2, since nothing is repaired", UNIFORM]),
        ({"criterion": "magnitude", "allocation": "per_kind"}, True, []),
        ({"criterion": "magnitude"}, True, [BOTH]),
        ({"allocation": "global"}, True, [TRIED]),
    ],
)
def test_the_plan_notes_what_auto_takes(pairs, settings, data, expected):
    given = (network(), pairs) if data else (network(), None)
    notes = plan(recipe(shrink(channels=0.5, **settings)), *given).notes
    found = [one for one in notes if one.startswith(("shrink: criterion", "shrink: allocation: "))]
    assert found == [f"shrink: {words}" for words in expected]


def test_plan_and_report_agree_where_nothing_stands_in_for_data(monkeypatch):
    monkeypatch.setattr(synthetic_inputs, "LARGEST", 10)
    notes = plan(recipe(shrink()), network()).notes
    assert "shrink: criterion: l2, since nothing is repaired" in notes
    sections = compress(recipe(shrink()), network()).report.to_dict()["steps"][0]["sections"]
    (chosen,) = [one for one in sections if one["title"] == "Chosen for auto"]
    why = "since nothing is repaired"
    assert chosen["rows"] == [["criterion", "l2", why], ["allocation", "uniform", why]]


def test_the_plan_notes_sizes_that_follow_from_the_weights(pairs):
    notes = plan(recipe(TRAIN, shrink(**ROUNDS), prune()), network(), pairs).notes
    assert any("the weights that the model has now, and uniform;" in note for note in notes)
    notes = plan(recipe(TRAIN, shrink(**ROUNDS, allocation="global"), prune()), network(), pairs).notes
    assert any("how many channels each layer loses follows from the weights at that time" in note for note in notes)


def test_the_plan_counts_the_epochs_of_the_rounds(pairs):
    step = plan(recipe(shrink(**ROUNDS)), network(), pairs).steps[0]
    assert (step.epochs, step.updates) == (4, 20)
    assert plan(recipe(shrink()), network(), pairs).steps[0].epochs is None


# ---- a whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.every_backend(cases=0)
def test_a_run_ends_with_the_smaller_model_in_every_file(pairs, tmp_path):
    settings = {"channels": 0.5, "allocation": "uniform", "repair": "weights", "examples": 32}
    steps = TRAIN, shrink(**settings), {"finetune": {"epochs": 1}}
    later = one_shot(0.5), {"export": {"formats": ["keras"]}}
    seen = []
    result = compress(recipe(*steps, *later), network(), pairs, tmp_path / "run", progress=seen.append)
    assert "parameters 464 -> 186, MACs 368 -> 136" in [item.text for item in seen]
    sizes = {"hidden/kernel": (8, 8), "second/kernel": (8, 6), "logits/kernel": (6, 4)}
    assert shapes(result.model) == sizes
    assert shapes(keras.models.load_model(tmp_path / "run" / "exports" / "model.keras", compile=False)) == sizes
    assert shapes(keras.models.load_model(tmp_path / "run" / "model.keras")) == sizes
    values = json.loads((tmp_path / "run" / "report.json").read_text())
    groups, stops, chosen, errors = values["steps"][1]["sections"]
    ((option, value, reason),) = chosen["rows"]
    assert option == "criterion" and value in ("l2", "output_error")
    assert reason.startswith("since its outputs are nearest: error ")
    assert [row[:3] for row in groups["rows"]] == [["hidden", 16, 8], ["second", 12, 6]]
    assert errors["title"] == "Errors of the layers"
    assert result.report.before.parameters == 464 and result.report.after.parameters == 186
    assert zeros(result.model, "hidden/kernel") == 32
    # The optimizer went on with its slots: five updates in each of two epochs.
    assert int(result.model.optimizer.iterations) == 10
    assert "; the model is smaller: 186 of 464 parameters are left." in result.report.verdict()


def test_without_data_channels_are_removed(perceptron):
    result = compress({"version": 1, "steps": [shrink()]}, perceptron)
    assert shapes(result.model) == {"hidden/kernel": (8, 8), "logits/kernel": (8, 4)}
    assert result.report.verdict() == "The model is smaller: 108 of 212 parameters are left."
    assert ("Parameters", "108", "50.9 % of 212 before") in cards(result.report)


@pytest.mark.parametrize("measure", ["parameters", "macs"])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_every_allocation_reaches_the_target_by_another_criterion_than_that_of_the_plan(pairs, measure, allocation):
    settings = {measure: 0.5, "allocation": allocation, "criterion": "taylor", "examples": 64}
    report = compress(recipe(shrink(**settings)), network(width=120), pairs).report
    before, after = report.before, report.after
    share = after.parameters / before.parameters if measure == "parameters" else after.macs / before.macs
    assert abs(share - 0.5) <= 0.01


@pytest.mark.one_backend
@pytest.mark.parametrize(("share", "left"), [(0.5, 0.514), (0.01, 0.035), (1.0, 1.0)])
def test_a_share_that_no_selection_reaches_is_replaced_by_the_nearest(share, left):
    _, report = pk.shrink(network(), macs=share, criterion="geometric_median", allocation="global", tolerance=None)
    before, after = report.macs
    assert after / before == pytest.approx(left, abs=0.0005)


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def replaced(monkeypatch):
    """(model, its masks) of each replacement of a run's model."""
    seen, inner = [], Workspace.replace_model

    def replace(self, model, *args):
        masks = dict(self.state.masks.pruned)
        inner(self, model, *args)
        seen.append((model, masks))

    monkeypatch.setattr(Workspace, "replace_model", replace)
    return seen


def counts(model):
    return {name: zeros(model, name) for name in ("hidden/kernel", "second/kernel", "logits/kernel")}


@pytest.mark.every_backend(cases=1)
@pytest.mark.short(cases=1)
@pytest.mark.parametrize("settings", [{"repair": "outputs", "epochs_per_round": 1}, {"repair": "weights"}, {}], ids=str)
def test_zeros_of_an_earlier_prune_step_hold_through_removal_and_training(pairs, replaced, settings):
    steps = (one_shot(0.75), shrink(channels=0.5, **settings), {"finetune": {"epochs": 2}})
    result = compress(recipe(TRAIN, *steps), network(), pairs)
    ((model, masks),) = replaced
    masked = {name: int((~mask).sum()) for name, mask in masks.items()}
    assert result.model is model
    assert counts(model) == masked and all(masked.values())
    assert result.report.after.targets == ("hidden/kernel", "second/kernel", "logits/kernel")


def test_a_repair_of_pruned_weights_fits_those_that_are_left(pairs):
    def errors(repair):
        steps = (one_shot(0.5), shrink(channels=0.5, repair=repair))
        report = told(compress(recipe(TRAIN, *steps), network(), pairs).report)
        sections = [one for one in report["steps"][-1]["sections"] if one["title"] == "Errors of the layers"]
        return np.array([row[1:] for section in sections for row in section["rows"]], float)

    weights, outputs = errors("weights"), errors("outputs")
    assert weights[:, 1].sum() < outputs[:, 1].sum() < outputs[:, 0].sum()


def test_a_later_prune_step_prunes_further_where_a_mask_was_cut(pairs):
    steps = (one_shot(0.5), shrink(channels=0.5, allocation="uniform"), one_shot(0.5), one_shot(0.75))
    result = compress(recipe(TRAIN, *steps), network(), pairs)
    assert counts(result.model) == {"hidden/kernel": 48, "second/kernel": 36, "logits/kernel": 18}


def test_zeros_that_the_model_came_with_hold(pairs):
    model = network()
    kernel = model.get_layer("second").kernel
    kernel.assign(np.where(np.arange(192).reshape(16, 12) % 5 == 0, 0, keras.ops.convert_to_numpy(kernel)))
    result = compress(recipe(TRAIN, shrink(), {"finetune": {"epochs": 1}}), model, pairs)
    assert zeros(result.model, "second/kernel") > 0
    assert not result.report.after.targets


def test_masks_of_grouped_convolutions_and_of_replaced_layers_are_cut(replaced):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inner = keras.Sequential([layers.Conv2D(8, 3, padding="same", activation="relu", name="one")], name="inner")
    model = sequential(
        (6, 6, 2),
        inner,
        layers.Conv2D(8, 3, groups=2, padding="same", name="grouped"),
        layers.GlobalAveragePooling2D(name="pool"),
        layers.Dense(3, name="logits"),
    )
    pruned = one_shot(0.5, criterion="random")
    result = compress({"version": 1, "seed": 3, "steps": [pruned, shrink()]}, model)
    ((_, masks),) = replaced
    weights = weight_arrays(result.model)
    assert len(masks) == 3 and list(masks) == list(result.report.after.targets)
    assert all(np.array_equal(weights[name] != 0, mask) for name, mask in masks.items())


# ---- rounds ----------------------------------------------------------------------------------------------------------


IN_ROUNDS = recipe(TRAIN, one_shot(0.5), shrink(**ROUNDS, allocation="global"), {"finetune": {"epochs": 1}})


@pytest.fixture(scope="module")
def whole(pairs, tmp_path_factory):
    return compress(IN_ROUNDS, network(), pairs, tmp_path_factory.mktemp("shrink") / "whole")


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


@pytest.mark.thorough
def test_rounds_of_a_multiple_end_with_multiples(pairs):
    settings = {"channels": 0.5, "multiple": 4, "rounds": 2, "epochs_per_round": 1}
    result = compress(recipe(shrink(**settings)), network(), pairs)
    assert shapes(result.model) == {"hidden/kernel": (8, 8), "second/kernel": (8, 8), "logits/kernel": (8, 4)}


def interrupted(kind, number, pairs, folder):
    """A run that is interrupted at an end of an epoch or step, or at the start of a training after a removal."""
    inner, calls = Workspace.fit, []

    def fit(self, *args, **kwargs):
        calls.append(None)
        if kind == "training" and len(calls) == number:
            raise KeyboardInterrupt
        return inner(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Workspace, "fit", fit)
        compress(IN_ROUNDS, network(), pairs, folder, progress=Stop(number) if kind == "end" else None)


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
    pairs, whole, tmp_path, point, epochs
):
    interrupted(*point, pairs, tmp_path / "run")
    seen = []
    result = compress(IN_ROUNDS, network(), pairs, tmp_path / "run", resume=True, progress=seen.append)
    assert sum(item.epoch is not None for item in seen) == epochs
    assert model_digest(result.model) == model_digest(whole.model)
    assert told(result.report) == told(whole.report)
    variables = zip(result.model.optimizer.variables, whole.model.optimizer.variables, strict=True)
    assert all(np.array_equal(*map(keras.ops.convert_to_numpy, pair)) for pair in variables)


@pytest.mark.short(cases=1)
def test_what_layers_learned_from_data_is_there_after_an_interruption(pairs, tmp_path):
    def adapted():
        keras.utils.set_random_seed(20)
        norm, classes = keras.layers.Normalization(name="norm"), keras.layers.IntegerLookup(name="lookup")
        norm.adapt(pairs[0][0] + 3)
        classes.adapt(np.arange(-9, 9))
        inputs = keras.Input((8,))
        words = keras.layers.Embedding(30, 4, name="table")(classes(keras.ops.cast(inputs, "int32")))
        x = keras.layers.Concatenate()([norm(inputs), keras.layers.Flatten()(words)])
        x = keras.layers.Dense(16, activation="relu", name="hidden")(x)
        return keras.Model(inputs, keras.layers.Dense(4, name="logits")(x))

    steps = recipe(shrink(channels=0.5, include=["hidden"]), {"finetune": {"epochs": 2}})
    whole = compress(steps, adapted(), pairs)
    # The second end is that of the first epoch after the removal.
    found = resumed(steps, adapted, pairs, tmp_path / "run", Stop(2))
    assert model_digest(found.model) == model_digest(whole.model)
    for one, two in zip(
        found.report.steps[1]["history"]["loss"], whole.report.steps[1]["history"]["loss"], strict=True
    ):
        assert one == pytest.approx(two, rel=1e-6)


@pytest.mark.thorough
def test_a_finished_run_is_verified_and_returned_as_it_ended(pairs, whole):
    assert verify(whole.directory, model=network(), data=pairs).identical
    again = compress(IN_ROUNDS, network(), pairs, whole.directory, resume=True)
    assert model_digest(again.model) == model_digest(whole.model)
