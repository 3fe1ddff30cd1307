"""The recipe step `quantize`: plan, what a run writes and measures, zeros, refusals, interruptions."""

import keras
import numpy as np
import pytest
from tiny_recipes import Stop, one_shot, prune, recipe, resumed, told

from prunekit.anatomy.files.digests import model_digest
from prunekit.delivery.pages.html_report import render_html
from prunekit.recipe.run.runner import compress, plan, verify
from prunekit.recipe.text.loader import RecipeError, load_recipe
from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import grid_holding

TRAIN = {"train": {"epochs": 1}}


def quantize(**settings):
    return {"quantize": {"examples": 64, **settings}}


def network():
    keras.utils.set_random_seed(20)
    layers = [
        keras.layers.Dense(32, name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.ReLU(name="relu"),
        keras.layers.Dense(32, activation="relu", name="second"),
        keras.layers.Dense(4, name="logits"),
    ]
    return keras.Sequential([keras.Input((8,), name="features"), *layers], name="tiny")


def sections_of(result, step):
    return {one["title"]: one for one in result.report.to_dict()["steps"][step]["sections"]}


def file_of(result, bits):
    return (result.directory / "exports" / f"model-{bits}.tflite").read_bytes()


def kernels(model):
    return {name: np.array(model.get_layer(name).kernel) for name in ("hidden", "second", "logits")}


def metrics_of(result, step):
    """(before, simulated, in the file) of the accuracy."""
    rows = sections_of(result, step)["Metrics of the integer model"]["rows"]
    return next(values for name, *values in rows if name == "accuracy")


def on_grids(model, bits):
    for name, kernel in kernels(model).items():
        grid = grid_holding(kernel, IntegerFormat(bits.get(f"{name}/kernel", 8)), Granularity((1,)))
        if not (np.abs(grid.nearest(kernel) - kernel) <= 1e-3 * grid.scale).all():
            return False
    return True


# ---- a run that rounds after training --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rounded(pairs, tmp_path_factory):
    """A run that prunes, and rounds weights to 8 bits, into a file of bytes in and out and of sparse kernels."""
    pruned = one_shot(0.75)
    bound = {"expect": {"bytes": {"litert-integer": {"max": 100_000}}}}
    steps = TRAIN, pruned, quantize(sparse=True, integer_io="uint8"), bound
    return compress(recipe(*steps), network(), pairs, tmp_path_factory.mktemp("rounded") / "run")


def test_a_run_writes_the_integer_file_and_measures_it(rounded):
    assert [step["kind"] for step in rounded.report.steps] == ["train", "prune", "quantize", "expect"]
    assert (rounded.directory / "exports" / "model-int8.tflite").is_file()
    (row,) = rounded.report.to_dict()["exports"]
    assert row["format"] == "litert-integer" and row["status"] == "ok" and row["file"] == "model-int8.tflite"
    # No float file of the model after the step stands beside metrics of integers.
    *_, file = stages = rounded.report.to_dict()["stages"]
    assert [one["name"] for one in stages] == ["before", "after 2. prune", "litert-integer"]
    assert file["latency"] is not None
    found = sections_of(rounded, 2)
    columns = [one["name"] for one in found["Metrics of the integer model"]["columns"]]
    assert columns == ["Metric", "Before", "Simulated", "File"]
    before, simulated, in_file = metrics_of(rounded, 2)
    assert abs(simulated - before) < 0.1 and abs(in_file - simulated) < 0.1
    assert len(found["Quantized weights"]["rows"]) == 3
    page = render_html(rounded.report)
    assert all(f"<b>{title}</b>" in page for title in ("Error of each weight", "Range of each tensor"))
    assert ">integer file</text>" in page and "litert-integer: 0." in page


def test_weights_lie_on_grids_and_zeros_stay_after_the_step(rounded):
    assert on_grids(rounded.model, {}) and (kernels(rounded.model)["hidden"] == 0.0).mean() >= 0.75


def test_kernels_of_the_file_are_encoded_sparsely_where_asked(rounded):
    rows = sections_of(rounded, 2)["Kernels of the file"]["rows"]
    assert len(rows) == 3 and all(row[-1].startswith("densely") or row[3] < row[2] for row in rows)
    with pytest.raises(RecipeError, match="sparse is about kernels of integer operations"):
        load_recipe(recipe(quantize(sparse=True, activation_bits="float")), data_given=True)


def test_inputs_and_outputs_of_the_file_are_uint8_where_asked(rounded):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(rounded.directory / "exports" / "model-int8.tflite"))
    found = [*interpreter.get_input_details(), *interpreter.get_output_details()]
    assert [one["dtype"] for one in found] == [np.uint8] * 2
    for activations, message in (
        (16, "those of files with activation_bits: 8"),
        ("float", "outputs in floating point"),
    ):
        with pytest.raises(RecipeError, match=message):
            load_recipe(recipe(quantize(integer_io="uint8", activation_bits=activations)), data_given=True)


def test_integers_of_an_input_that_is_read_in_floating_point_fail_the_file_and_not_the_run(pairs, tmp_path):
    result = compress(recipe(quantize(integer_io=["inputs"], exclude=["hidden"])), network(), pairs, tmp_path / "run")
    (row,) = result.report.to_dict()["exports"]
    assert row["status"] == "failed" and "'features', which is read in floating point" in row["note"]


def test_later_bounds_are_about_the_simulation(pairs):
    bounds = {"metrics": {"loss": {"max": 9.0}}, "drop": {"loss": 9.0}}
    report = compress(recipe(TRAIN, quantize(bits=2), {"expect": bounds}), network(), pairs).report.to_dict()
    rows = report["steps"][1]["sections"][0]["rows"]
    before, simulated = next(values[:2] for name, *values in rows if name == "loss")
    assert report["steps"][0]["metrics"]["loss"] == before != simulated == report["steps"][1]["metrics"]["loss"]
    measured = {one["what"]: one["measured"] for one in report["expectations"]}
    assert measured == pytest.approx({"loss": simulated, "drop of loss": simulated - before})


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("settings", [{}, {"epochs": 1}], ids=["after training", "in training"])
def test_activations_of_16_bits_are_written_in_a_file_of_their_name(pairs, tmp_path, settings):
    result = compress(recipe(quantize(activation_bits=16, **settings)), network(), pairs, tmp_path / "run")
    assert (tmp_path / "run" / "exports" / "model-int8-activations16.tflite").is_file()
    (row,) = result.report.to_dict()["exports"]
    assert row["status"] == "ok"
    rows = sections_of(result, 0)["Tensors of the file and of the simulation"]["rows"]
    assert [largest <= 2 for _, largest, _ in rows] == [True] * 4


def test_a_budget_that_the_planned_model_exceeds_is_noted_if_the_run_may_remove_more(pairs):
    steps = [TRAIN, {"shrink": {"parameters": 0.6}}, quantize(bits=[4, 8], budget=100)]
    (note,) = [one for one in plan(recipe(*steps), network(), pairs).notes if one.startswith("quantize")]
    assert "As it is planned: With the fewest bits the weights of 'tiny' have" in note
    with pytest.raises(ValueError, match="With the fewest bits the weights of 'tiny' have"):
        compress(recipe(*steps), network(), pairs)
    steps[-1] = quantize(bits=[4, 8], budget=9000)
    assert not [one for one in plan(recipe(*steps), network(), pairs).notes if one.startswith("quantize")]


def test_the_plan_lists_bits_granularity_and_range_of_each_tensor(pairs):
    found = plan(recipe(TRAIN, quantize(bits=4, exclude=["logits"])), network(), pairs).steps[1]
    assert "4-bit weights, 8-bit activations" in found.text and "model-int4.tflite" in found.text
    weights, tensors, left = found.sections
    assert [row[0] for row in weights.rows] == ["hidden/kernel", "second/kernel"]
    assert weights.rows[0][2:] == ("4", "per index of axis 1", "mse")
    assert tensors.rows == tuple((name, 8, "per tensor", "mse") for name in ("features", "relu", "second"))
    assert ("logits", "excluded by 'logits'") in left.rows


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("settings", [{"bits": [4, 8], "budget": 3000}, {"epochs": 1}, {}], ids=str)
def test_groups_of_inputs_are_planned_and_written(pairs, tmp_path, settings):
    steps = recipe(quantize(**{"bits": 4, **settings}, activation_bits="float", group_size=16))
    planned = plan(steps, network(), pairs).steps[0]
    assert " in groups of 16, float activations" in planned.text
    # The first layer has 8 inputs.
    scales = ["per index of axis 1", *["per index of axis 1 and 16 entries"] * 2]
    assert [row[3] for row in planned.sections[0].rows] == scales
    result = compress(steps, network(), pairs, tmp_path / "run")
    rows = sections_of(result, 0)["Quantized weights"]["rows"]
    assert [row[3] for row in rows] == scales
    assert any("at most 16 inputs: hidden/kernel" in note for note in result.report.notes)
    (row,) = result.report.to_dict()["exports"]
    assert row["status"] == "ok"


@pytest.mark.parametrize("bits", [2, [3, 8], 4], ids=str)
def test_the_plan_says_that_files_store_fewer_bits_as_4(pairs, bits):
    settings = {"budget": 10**6} if isinstance(bits, list) else {}
    told = plan(recipe(quantize(bits=bits, **settings)), network(), pairs).notes
    found = [one for one in told if "a LiteRT file stores each code with 4 bits" in one]
    assert len(found) == (bits != 4)


def test_a_plan_prints_its_tables(pairs, capsys):
    from rich.console import Console

    from prunekit.recipe.run.plan import show_plan

    show_plan(plan(recipe(quantize()), network(), pairs), Console(width=160))
    text = capsys.readouterr().out
    assert "Weights to quantize" in text and "Tensors to round" in text and "hidden/kernel" in text


def test_bits_are_chosen_for_a_budget_and_named_in_plan_and_report(pairs, tmp_path):
    steps = recipe(quantize(bits=[4, 8], budget=2200))
    found = plan(steps, network(), pairs).steps[0]
    assert "weights of 4 or 8 bits for at most 2,200 bytes" in found.text and "model-mixed.tflite" in found.text
    assert [row[2] for row in found.sections[0].rows] == ["4 or 8"] * 3
    result = compress(steps, network(), pairs, tmp_path / "run")
    assert (tmp_path / "run" / "exports" / "model-mixed.tflite").is_file()
    assert set(bits_chosen(result, 0).values()) == {4, 8} and "<b>Error against bytes</b>" in render_html(result.report)


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("drop", [1.0, 0.02, 0.0])
def test_a_drop_of_the_main_metric_is_kept_on_the_validation_data(pairs, drop):
    result = compress(recipe(TRAIN, quantize(bits=[2, 4, 8], drop=drop)), network(), pairs)
    found = sections_of(result, 1)
    trials = found["Evaluated choices"]["rows"]
    size = sum(row[-1] for row in found["Bits of each weight"]["rows"])
    # The chosen one is the largest of those that hold: trials in between failed.
    held = [(one, metric) for one, metric, reaches in trials if reaches == "yes"]
    assert all(metric >= -drop - 1e-9 for _, metric in held)
    assert min(one for one, _ in held) >= size
    assert any("measured on the test data" in note for note in result.report.notes)
    if drop == 1.0:
        # A file stores 2 bits as 4.
        assert {row[-2] for row in found["Bits of each weight"]["rows"]} == {"4"}


def test_bits_by_patterns_and_zeros_of_the_step(pairs):
    settings = dict(bits={"hidden": 4, "logits": "float"}, sparsity=0.5, pattern="2:4", exclude=[])
    found = plan(recipe(quantize(**settings)), network(), pairs).steps[0]
    assert "weights by patterns ('hidden' 4 bits, 'logits' float) with 0.5 zeros (2:4)" in found.text
    result = compress(recipe(quantize(**settings)), network(), pairs)
    rows = {row[0]: row for row in sections_of(result, 0)["Quantized weights"]["rows"]}
    assert set(rows) == {"hidden/kernel", "second/kernel"}
    assert (rows["hidden/kernel"][2], rows["second/kernel"][2]) == (4, 8)
    assert sorted(result.report.after.targets) == ["hidden/kernel", "second/kernel"]
    assert result.report.pruned_sparsity >= 0.5
    groups = kernels(result.model)["second"].reshape(8, 4, 32)
    assert (np.count_nonzero(groups, axis=1) <= 2).all()


def test_awq_is_a_method_of_the_step(pairs):
    result = compress(recipe(quantize(bits=4, method="awq")), network(), pairs)
    assert any("Activation-aware scaling changed the channels" in note for note in result.report.notes)
    assert on_grids(result.model, dict.fromkeys(("hidden/kernel", "second/kernel", "logits/kernel"), 4))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([quantize(bits=9)], "bits"),
        ([quantize(bits=[4, 8])], "for a budget of bytes, or for a drop of the main metric. Received: bits"),
        ([quantize(bits=[4, 8], budget=9000, drop=0.1)], "Received: budget and drop"),
        ([quantize(bits=4, budget=9000)], "budget chooses the bits: write a list"),
        ([quantize(bits=[4, 4], budget=9000)], "expected bits, 2 to 8; a list of bits"),
        ([TRAIN, quantize(bits=[4, 8], budget=900)], "With the fewest bits the weights .* Received: budget=900"),
        ([quantize(bits=8, budget=9000)], "budget chooses the bits: write a list"),
        ([quantize(bits={"re:[": 4})], "is not a regular expression"),
        ([quantize(bits={"hidden": 12})], "expected bits, 2 to 8; a list of bits"),
        ([quantize(bits={"hiden": 4})], "Did you mean 'hidden'"),
        ([quantize(epochs=1, sparsity=0.5)], "sparsity is about rounding without training"),
        ([quantize(pattern="2:4")], "pattern is that of new zeros: write sparsity, too. Received: '2:4'"),
        ([quantize(drop=-0.1)], "drop"),
        ([quantize(activation_bits=12)], "expected 8 or 16 bits, or float"),
        ([quantize(activation_bits=True)], "expected 8 or 16 bits, or float .*Received: true"),
        ([quantize(activation_ranges="max")], "expected minmax, mse or percentile"),
        ([quantize(group_size=32)], "scales of groups: write activation_bits: float, too. Received: group_size 32 and"),
        ([quantize(group_size=32, activation_bits=16)], "Received: group_size 32 and activation_bits 16"),
        ([quantize(group_size=8, activation_bits="float")], "16 or more: .*Received: 8"),
        ([quantize(group_size=0, activation_bits="float")], "group_size"),
        ([quantize(bit=4)], "unknown key 'bit'.* Did you mean 'bits'"),
        ([quantize(exclude=["hiden"])], "Did you mean 'hidden'"),
        ([quantize(epochs=1, method="gptq")], "method is about rounding without training"),
        ([quantize(epochs=1, memory=1e6)], "memory is about weights that are rounded or measured on data"),
        ([quantize(memory=0)], "memory"),
        ([quantize(epochs=1, equalize=True)], "equalize is about rounding without training"),
        ([quantize(learning_rate=0.1)], "learning_rate is about a training on integers: write epochs, too"),
        ([quantize(epochs=2, begin_epoch=2)], "begins before the last epoch. Received: begin_epoch 2 and epochs 2"),
        ([quantize(epochs=0)], "epochs"),
        ([quantize(misfits="refuse")], "misfits"),
        ([quantize(full_integer=True, activation_bits="float")], "nothing computes in floating point"),
        ([quantize(full_integer=True, drop=0.1)], "for a drop weights may stay in floating point"),
        ([quantize(), TRAIN], "Write the quantize step after this one"),
        ([quantize(), prune()], "Write the quantize step after this one"),
        ([quantize(), quantize(name="again")], "Write the quantize step after this one"),
        ([{"export": {"formats": ["litert-integer"]}}], "litert-integer"),
        ([{"expect": {"bytes": {"litert-integer": {"max": 1}}}}], "is not exported before this step"),
    ],
    ids=str,
)
def test_a_mistake_is_refused_before_any_step(pairs, steps, message):
    with pytest.raises(RecipeError, match=message):
        compress(recipe(*steps), network(), pairs)


def test_quantize_needs_data():
    with pytest.raises(RecipeError, match="data"):
        compress(load_recipe({"version": 1, "steps": [quantize()]}), network())


@pytest.mark.every_backend
def test_other_backends_are_refused_before_any_step(pairs):
    if keras.backend.backend() == "tensorflow":
        assert plan(recipe(quantize()), network(), pairs).steps[0].kind == "quantize"
        return
    with pytest.raises(RecipeError, match="needs the TensorFlow backend"):
        compress(recipe(quantize()), network(), pairs)


def test_a_file_that_fails_leaves_a_row_with_the_reason(pairs, monkeypatch):
    from prunekit.delivery.integers.integer_report import IntegerExportError
    from prunekit.recipe.steps import integer_files

    def failing(*arguments, **options):
        raise IntegerExportError("The model cannot be converted: no.")

    monkeypatch.setattr(integer_files, "export_integers", failing)
    (row,) = compress(recipe(quantize()), network(), pairs).report.to_dict()["exports"]
    assert row["status"] == "failed" and "no." in row["note"] and row["file"] is None


@pytest.mark.thorough
def test_an_interrupted_run_ends_with_the_same_bytes(pairs, tmp_path):
    steps = recipe(TRAIN, quantize(bits=4), {"export": {"formats": ["keras"]}})
    whole = compress(steps, network(), pairs, tmp_path / "whole")
    found = resumed(steps, network, pairs, tmp_path / "run", Stop(2))
    assert model_digest(found.model) == model_digest(whole.model)
    assert told(found.report)["steps"] == told(whole.report)["steps"]
    assert file_of(found, "int4") == file_of(whole, "int4")


def test_the_plan_of_a_training_on_integers_has_epochs_and_updates(pairs):
    (step,) = plan(recipe(quantize(epochs=3, begin_epoch=1, learning_rate=0.001)), network(), pairs).steps
    assert step.epochs == 3 and step.updates
    assert "3 epochs, on integers after 1, learning rate 0.001" in step.text and "method" not in step.text


@pytest.mark.thorough
@pytest.mark.parametrize("begin_epoch", [0, 2])
def test_a_training_on_integers_that_is_interrupted_ends_with_the_same_bytes(pairs, tmp_path, begin_epoch):
    training = quantize(bits=4, epochs=4, begin_epoch=begin_epoch)
    steps = recipe(prune(exclude=["logits"]), training, {"export": {"formats": ["keras"]}})
    whole = compress(steps, network(), pairs, tmp_path / "whole")
    # Two epochs of pruning, and three of the training on integers.
    found = resumed(steps, network, pairs, tmp_path / "run", Stop(5, steps=False))
    assert model_digest(found.model) == model_digest(whole.model)
    assert file_of(found, "int4") == file_of(whole, "int4")


TRAINED = recipe(TRAIN, prune(exclude=["logits"]), quantize(bits=[3, 8], budget=2200, epochs=3))


@pytest.fixture(scope="module")
def trained(pairs, tmp_path_factory):
    """A run that prunes, chooses bits for a budget, and trains on integers."""
    return compress(TRAINED, network(), pairs, tmp_path_factory.mktemp("trained") / "run")


def bits_chosen(result, step):
    return {row[0]: int(row[-2]) for row in sections_of(result, step)["Bits of each weight"]["rows"]}


def test_weights_are_trained_on_integers_and_zeros_of_earlier_steps_stay(pairs, trained):
    report = trained.report.to_dict()
    assert [len(one["history"]["loss"]) for one in report["steps"] if one["kind"] == "quantize"] == [3]
    assert report["exports"][0]["file"] == "model-mixed.tflite" and report["exports"][0]["status"] == "ok"
    assert on_grids(trained.model, bits_chosen(trained, 2))
    zeros = kernels(compress(recipe(TRAIN, prune(exclude=["logits"])), network(), pairs).model)["hidden"] == 0.0
    assert zeros.mean() >= 0.75 and (kernels(trained.model)["hidden"][zeros] == 0.0).all()
    before, simulated, in_file = metrics_of(trained, 2)
    assert abs(in_file - simulated) < 0.05 and simulated >= before - 0.1


def test_bits_for_a_budget_are_chosen_before_the_training_and_kept_when_it_resumes(
    pairs, trained, tmp_path, monkeypatch
):
    chosen = bits_chosen(trained, 2)
    assert set(chosen.values()) == {3, 8}
    assert {row[0]: row[2] for row in sections_of(trained, 2)["Quantized weights"]["rows"]} == chosen
    with pytest.raises(KeyboardInterrupt):
        # An epoch of training, two of pruning, and two of the training on integers.
        compress(TRAINED, network(), pairs, tmp_path / "run", progress=Stop(5, steps=False))
    # Weights that were trained meanwhile might be given other bits.
    monkeypatch.setattr("prunekit.recipe.steps.quantize_step.choose_bits", None)
    found = compress(TRAINED, network(), pairs, tmp_path / "run", resume=True)
    assert told(found.report)["steps"] == told(trained.report)["steps"]
    assert found.report.to_dict()["exports"] == trained.report.to_dict()["exports"]
    assert model_digest(found.model) == model_digest(trained.model)
    assert file_of(found, "mixed") == file_of(trained, "mixed")


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, {"epochs": 2}], ids=["after training", "in training"])
def test_a_run_is_repeated_by_verify(pairs, tmp_path, settings):
    compress(recipe(TRAIN, quantize(bits=4, **settings)), network(), pairs, tmp_path / "run")
    assert verify(tmp_path / "run", model=network(), data=pairs).identical
