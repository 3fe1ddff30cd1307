"""The recipe step `shrink` to measured sizes and without the channels that are zero, and trainings before it."""

import contextlib

import keras
import numpy as np
import pytest
from shrink_recipes import network, shapes, shrink
from tiny_recipes import Stop, one_shot, prune, recipe, resumed, zeros

from prunekit.anatomy.files.digests import model_digest
from prunekit.recipe.run.runner import compress, plan
from prunekit.recipe.settings.shrink_settings import Shrink
from prunekit.recipe.state.replicas import Replicas
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.steps import shrink_step
from prunekit.recipe.text.loader import RecipeError, load_recipe
from prunekit.techniques.shrink.channels.measured_size import Measure, Measured

TRAIN = {"train": {"epochs": 1}}


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

    monkeypatch.setattr("prunekit.operations.shrink.measure_of", measure_of)
    monkeypatch.setattr(shrink_step, "check_measure", lambda name: None)
    return found


@pytest.mark.every_backend(cases=0)
@pytest.mark.parametrize("target", ["bytes", "latency"])
def test_a_measured_target_is_reached_planned_and_reported(pairs, measured, target):
    steps = recipe(shrink(**{target: 0.7}), one_shot(0.5))
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


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs a converter")
def test_the_bytes_of_a_run_are_those_of_its_exported_file(pairs, tmp_path):
    # Untrained biases are equal, and a file has equal constants once.
    steps = TRAIN, shrink(bytes=0.6), {"export": {"formats": ["litert"]}}
    result = compress(recipe(*steps), network(width=200), pairs, tmp_path / "run")
    section = next(one for one in result.report.steps[1]["sections"] if one["title"] == "Measured size")
    before, after = section["rows"][0][2:4]
    assert (tmp_path / "run" / "exports" / "model.tflite").stat().st_size == after
    assert abs(after / before - 0.6) <= 0.012


# ---- channels that are zero ------------------------------------------------------------------------------------------


def test_whole_channels_are_pruned_and_the_zero_ones_removed(pairs):
    pruned = one_shot(0.5, pattern="channel", exclude=["logits"])
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
    nm = one_shot(0.5, pattern="2:4")
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


GROWING = {"channels": 0.5, "increase": 20.0, "frequency": 2, "ceiling": 1000.0}


@pytest.mark.parametrize("penalty", [{"group_lasso": 1.0}, {"growing_regularization": GROWING}], ids=str)
def test_a_penalty_without_channels_is_refused_before_any_step(pairs, penalty):
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="logits")])
    with pytest.raises(RecipeError, match=f"{next(iter(penalty))}: .*no channels that can be removed"):
        compress(recipe({"train": {"epochs": 1, **penalty}}), plain, pairs)


def test_a_training_has_one_penalty():
    with pytest.raises(RecipeError, match="a training has one penalty on channels. Received: group_lasso and growing"):
        compress(recipe({"train": {"epochs": 1, "group_lasso": 1.0, "growing_regularization": GROWING}}), network())


@pytest.mark.parametrize(("share", "hint"), [(50, " Write 0.5 for 50 %."), (1, ""), (0, "")])
def test_a_growing_penalty_leaves_a_share_of_the_channels_alone(share, hint):
    with pytest.raises(RecipeError) as found:
        compress(recipe({"train": {"epochs": 1, "growing_regularization": {**GROWING, "channels": share}}}), network())
    assert f"expected the share that is left alone, in (0, 1). Received: {share}.{hint}" in str(found.value)


def penalized(penalty):
    return recipe({"train": {"epochs": 3, **penalty}})


@pytest.fixture(scope="module")
def grown(pairs):
    return compress(penalized({"growing_regularization": GROWING}), network(), pairs)


def test_a_growing_penalty_makes_the_selected_channels_small(pairs, grown):
    norms = np.sort(np.linalg.norm(np.array(grown.model.get_layer("hidden").kernel), axis=0))
    assert norms[: norms.size // 2].max() < 0.3 * norms[norms.size // 2 :].min()
    text = str(plan(penalized({"growing_regularization": GROWING}), network(), pairs))
    assert "growing regularization of all but 0.5 of the channels" in text


@pytest.mark.every_backend(cases=0)
def test_a_run_with_a_penalty_resumes_with_the_same_bytes(pairs, tmp_path, grown):
    steps = penalized({"growing_regularization": GROWING})
    assert model_digest(resumed(steps, network, pairs, tmp_path / "run", Stop(2)).model) == model_digest(grown.model)


@pytest.mark.thorough
@pytest.mark.every_backend(cases=0)
def test_a_run_with_a_group_lasso_resumes_with_the_same_bytes(pairs, tmp_path):
    steps = penalized({"group_lasso": 0.5})
    whole = compress(steps, network(), pairs)
    assert model_digest(resumed(steps, network, pairs, tmp_path / "run", Stop(2)).model) == model_digest(whole.model)
    assert model_digest(compress(penalized({}), network(), pairs).model) != model_digest(whole.model)
