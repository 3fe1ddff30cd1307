"""One-shot steps of recipes that read calibration data: repairs, criteria, allocations, number of examples."""

import numpy as np
import pytest
from networks import dense_network

import prunekit as pk
from prunekit.core.data import synthetic_inputs
from prunekit.core.layerwise import layerwise
from prunekit.recipe.run.plan import plan
from prunekit.recipe.text.loader import RecipeError


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(400, 12)).astype("float32")
    return inputs, (inputs[:, 0] > 0).astype("int32")


def network():
    return dense_network(12, seed=0, hidden=24, head=2)


def recipe(step):
    return {"version": 1, "seed": 1, "steps": [{"prune": {"allocation": "uniform", **step}}]}


def run(step, data):
    return pk.compress(recipe(step), network(), (data, data))


def test_a_step_repairs_and_reports_the_layer_errors(data):
    repaired = run({"sparsity": 0.75, "repair": "weights"}, data)
    kernel = np.array(repaired.model.get_layer("hidden").kernel)
    assert np.count_nonzero(kernel == 0) == round(0.75 * kernel.size)
    kept = kernel != 0
    assert not np.array_equal(kernel[kept], np.array(network().get_layer("hidden").kernel)[kept])
    chosen, section = repaired.report.steps[0]["sections"]
    assert chosen["title"] == "Chosen for auto" and chosen["rows"][0][:2] == ["criterion", "output_error"]
    assert section["title"] == "Output errors"
    assert [row[0] for row in section["rows"]] == ["hidden/kernel", "head/kernel"]


def test_without_repair_a_criterion_of_weights_changes_no_kept_weight(data):
    model = run({"sparsity": 0.75, "repair": "none"}, data).model
    kernel, start = np.array(model.get_layer("hidden").kernel), np.array(network().get_layer("hidden").kernel)
    np.testing.assert_array_equal(kernel[kernel != 0], start[kernel != 0])


def test_criterion_and_allocation_by_name_with_options_give_the_same_bytes_twice(data):
    step = {
        "sparsity": 0.75,
        "criterion": {"type": "sparsegpt", "run": 4},
        "allocation": {"type": "layer_error", "objective": "equal"},
        "examples": 100,
    }
    first, second = (run(step, data).model.get_weights() for _ in range(2))
    assert all(map(np.array_equal, first, second))
    more = run(step | {"examples": 300}, data).model.get_weights()
    assert not all(map(np.array_equal, first, more))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            {"sparsity": 0.5, "examples": 10, "repair": "none"},
            "'examples' needs 'repair', or a criterion or allocation that reads",
        ),
        (
            {"epochs": 1, "schedule": {"type": "constant", "target_sparsity": 0.5}, "repair": "weights"},
            "'repair' belongs to one-shot pruning",
        ),
        ({"sparsity": 0.5, "repair": "bias"}, "repair"),
        (
            {"epochs": 1, "schedule": {"type": "constant", "target_sparsity": 0.5}, "memory": 1e6},
            "'memory' belongs to one-shot pruning",
        ),
        ({"sparsity": 0.5, "memory": 0}, "memory must be a finite number above 0"),
        ({"sparsity": 0.5, "memory": "500"}, "memory must be bytes, such as 500MB, 1GB or 1e9. Received: '500'"),
        ({"sparsity": 0.5, "memory": [1]}, "memory must be a number above 0"),
        ({"sparsity": 0.5, "allocation": {"type": "layer_error", "objective": "least"}}, "objective"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(step, message):
    with pytest.raises(RecipeError, match=message):
        pk.compress(recipe(step), network())


@pytest.mark.parametrize("options", [{}, {"criterion": "magnitude", "repair": "weights"}], ids=str)
def test_without_data_a_step_repairs_on_synthetic_inputs_as_python_does(options):
    found = pk.compress(recipe({"sparsity": 0.5, **options}), network())
    again = network()
    pk.prune(again, 0.5, allocation="uniform", **options)
    for one, other in zip(found.model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert any("No data were given: the weights were fitted on 1,024 synthetic" in note for note in found.report.notes)


def test_a_run_makes_its_synthetic_inputs_once(monkeypatch):
    made, original = [], synthetic_inputs.synthetic_inputs

    def counted(*arguments):
        made.append(original(*arguments))
        return made[-1]

    monkeypatch.setattr(synthetic_inputs, "synthetic_inputs", counted)
    pk.compress(recipe({"sparsity": 0.5}), network())
    # The plan tries a few.
    assert [len(one) for one in made] == [4, 1024]


def test_a_plan_without_data_says_what_auto_takes():
    notes = plan(recipe({"sparsity": 0.5}), network()).notes
    assert "prune: criterion: output_error, on synthetic inputs, since no data were given" in notes


def test_a_plan_names_the_allocations_that_the_run_tries(data):
    step = recipe({"sparsity": 0.5, "allocation": "auto"})
    notes = plan(step, network(), (data, data)).notes
    tried = "prune: allocation: layer_error or lamp, whichever leaves the outputs nearest; the counts above are of the"
    assert any(note.startswith(tried) for note in notes)


def test_without_data_and_repair_the_weights_are_pruned_alone():
    model = pk.compress(recipe({"sparsity": 0.5, "repair": "none"}), network()).model
    kernel, start = np.array(model.get_layer("hidden").kernel), np.array(network().get_layer("hidden").kernel)
    np.testing.assert_array_equal(kernel[kernel != 0], start[kernel != 0])


def test_a_step_keeps_no_more_activations_than_asked_and_tells_of_each_layer(data, monkeypatch):
    given, plain, events = [], layerwise.walk, []
    monkeypatch.setattr(layerwise, "walk", lambda *args: given.append(args[-1]) or plain(*args))
    step = recipe({"sparsity": 0.5, "memory": "4.096 kB"})
    pk.compress(step, network(), (data, data), progress=events.append)
    assert given == [4096]
    texts = [event.text for event in events]
    assert texts[1:3] == ["hidden/kernel, 1 of 2", "head/kernel, 2 of 2"]
    # Another line in a pipe would follow from a fraction of 1 before the step has ended.
    assert [event.fraction for event in events if event.fraction == 1.0 and not event.finished] == [1.0]


def test_a_step_tells_of_the_examples_that_it_reads_before_the_first_weight(data):
    events = []
    pk.compress(recipe({"sparsity": 0.5, "allocation": "layer_error"}), network(), (data, data), progress=events.append)
    texts, fractions = [event.text for event in events], [event.fraction for event in events if not event.finished]
    assert texts[1] == "examples read, 64 of 400" and texts[7] == "examples read, 400 of 400"
    assert texts[8:10] == ["hidden/kernel, 1 of 2", "head/kernel, 2 of 2"]
    assert fractions == sorted(fractions) and fractions.count(1.0) == 1
    assert events[3].seconds_left is not None
