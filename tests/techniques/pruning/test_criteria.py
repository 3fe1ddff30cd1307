"""Every criterion in `pk.prune`, in the callback, in a tape loop and in a recipe, and SynFlow's rounds."""

import warnings

import keras
import numpy as np
import pytest
import tiny_recipes
from keras import ops

import prunekit as pk
from prunekit.recipe.run.runner import compress
from prunekit.recipe.text.loader import RecipeError
from prunekit.sparsity.gradient_scores import SynFlow
from prunekit.sparsity.scores import Magnitude
from prunekit.sparsity.shorthands import CRITERIA, sources_of

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Movement needs updates before the first mask: tests/techniques/pruning/test_movement.py.
NAMES = [name for name, row in CRITERIA.items() if "training" not in sources_of(row.needs)]


def network():
    layers = keras.layers
    hidden = [layers.Dense(8, name="hidden"), layers.BatchNormalization(), layers.ReLU()]
    model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(4, name="logits")])
    model.compile("sgd", LOSS, run_eagerly=True)
    return model


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def criterion(name):
    return SynFlow(rounds=3) if name == "synflow" else name


@pytest.fixture
def data(name, samples):
    return samples if "data" in sources_of(CRITERIA[name].needs) else None


def zeros(model):
    return int(np.sum(ops.convert_to_numpy(ops.convert_to_tensor(model.layers[0].kernel)) == 0))


def test_in_pk_prune(criterion, data):
    model = network()
    report = pk.prune(model, 0.75, data, criterion=criterion, include="hidden", allocation="uniform")
    assert zeros(model) == 48 and [event.reached for event in report.events] == [0.75]


@pytest.mark.short(cases=7)
def test_in_fit_at_each_mask_update(criterion, data, samples):
    model = network()
    schedule = pk.schedules.PolynomialDecay(0.25, 0.75, 0, 2, power=1, frequency=1)
    callback = pk.PruningCallback(schedule, criterion, data=data, include="hidden", allocation="uniform")
    model.fit(*samples, batch_size=35, verbose=0, callbacks=[callback])
    assert zeros(model) == 48 and [event.reached for event in callback.report.events] == [0.25, 0.5, 0.75]


@pytest.mark.short(cases=7)
def test_in_a_tape_loop(criterion, data, samples):
    import tensorflow as tf

    model = network()
    schedule = pk.schedules.ConstantSparsity(0.75, begin_step=1, frequency=1)
    with pk.Pruner(model, schedule, data=data, criterion=criterion, include="hidden", allocation="uniform") as pruner:
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = LOSS(samples[1], model(samples[0], training=True))
            variables = model.trainable_variables
            model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            pruner.step()
        assert not any(pruner.audit().values())
    assert zeros(model) == 48


def repair(name):
    """The field that leaves out repairs, which take longer than all else here; without data there are none."""
    return {"repair": "none"} if "data" in sources_of(CRITERIA[name].needs) else {}


def test_in_a_recipe(pairs):
    # One step for each criterion.
    shares = np.linspace(0.1, 0.8, len(NAMES))
    written = [{"type": name, "rounds": 3} if name == "synflow" else name for name in NAMES]
    steps = [
        {
            "prune": {
                "sparsity": float(share),
                "criterion": each,
                "include": ["hidden"],
                **repair(name),
                "allocation": "uniform",
                "repair": "none",
            }
        }
        for share, name, each in zip(shares, NAMES, written, strict=True)
    ]
    model = network()
    result = compress(tiny_recipes.recipe(*steps), model, pairs)
    assert zeros(result.model) == round(0.8 * 64)
    for share, event in zip(shares, result.report.events, strict=False):
        assert event.reached == pytest.approx(share, abs=1 / 64)


def test_a_recipe_is_refused_before_it_trains_where_a_statistic_does_not_exist(pairs):
    steps = [
        {"train": {"epochs": 1}},
        {"prune": {"sparsity": 0.5, "criterion": "batch_normalization_scale", "allocation": "uniform"}},
    ]
    model = network()
    before = model.get_weights()
    with pytest.raises(
        RecipeError, match=r"steps\[1\].prune: .*Received: logits/kernel, whose layer's output does not"
    ):
        compress(tiny_recipes.recipe(*steps), model, pairs)
    for weight, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_statistics_leave_weights_state_and_random_numbers_as_they_were(samples):
    model = network()
    before = [ops.convert_to_numpy(ops.convert_to_tensor(weight)).copy() for weight in model.weights]
    for name in NAMES:
        needs_data = "data" in sources_of(CRITERIA[name].needs)
        # Sparsity 0 prunes nothing, with all statistics collected.
        pk.prune(model, 0.0, samples if needs_data else None, criterion=name, include="hidden", allocation="uniform")
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(ops.convert_to_tensor(weight)), value)


def test_a_function_of_the_user_reads_statistics(samples):
    def inverse(weight, *, statistics, target):
        assert target.name == "hidden/kernel"
        return -ops.abs(weight * statistics["gradient"])

    inverse.needs = ("gradient",)
    models = [network(), network()]
    models[1].set_weights(models[0].get_weights())
    pk.prune(models[0], 0.5, samples, criterion="snip", include="hidden", allocation="uniform")
    pk.prune(models[1], 0.5, samples, criterion=inverse, include="hidden", allocation="uniform")
    masks = [ops.convert_to_numpy(ops.convert_to_tensor(model.layers[0].kernel)) != 0 for model in models]
    np.testing.assert_array_equal(masks[0], ~masks[1])


# SynFlow's rounds ----------------------------------------------------------------------------------------------------


def linear_network(kernels):
    layers = [keras.layers.Dense(kernel.shape[1], use_bias=False) for kernel in kernels]
    model = keras.Sequential([keras.Input((kernels[0].shape[0],)), *layers])
    model.set_weights(kernels)
    return model


def synflow_masks(kernels, sparsity, rounds):
    """Algorithm 1 of the paper for a network of matrices, written plainly."""
    masks = [np.ones(kernel.shape, bool) for kernel in kernels]
    for k in range(1, rounds + 1):
        values = [np.abs(kernel.astype("float64")) * mask for kernel, mask in zip(kernels, masks, strict=True)]
        scores = []
        for i, value in enumerate(values):
            into = np.ones(kernels[0].shape[0])
            for other in values[:i]:
                into = into @ other
            out = np.ones(kernels[-1].shape[1])
            for other in reversed(values[i + 1 :]):
                out = other @ out
            scores.append(value * np.outer(into, out))
        flat = np.concatenate([np.where(mask, score, -1).ravel() for mask, score in zip(masks, scores, strict=True)])
        kept = flat.size - round((1 - (1 - sparsity) ** (k / rounds)) * flat.size)
        threshold = np.sort(flat)[-kept]
        masks = [mask & (score >= threshold) for mask, score in zip(masks, scores, strict=True)]
    return masks


KERNELS = [
    np.random.default_rng(i).normal(size=shape).astype("float32")
    for i, shape in enumerate([(6, 20), (20, 20), (20, 3)])
]


@pytest.mark.parametrize("rounds", [7, 1])
def test_synflow_prunes_in_rounds_with_new_scores(rounds):
    model = linear_network(KERNELS)
    report = pk.prune(model, 0.9, criterion=SynFlow(rounds=rounds), allocation="global", keep_one=False)
    for layer, mask in zip(model.layers, synflow_masks(KERNELS, 0.9, rounds), strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(ops.convert_to_tensor(layer.kernel)) != 0, mask)
    assert len(report.events) == 1


def test_rounds_keep_every_layer_where_a_single_round_empties_layers():
    wide = [
        np.random.default_rng(i).normal(size=shape).astype("float32")
        for i, shape in enumerate([(4, 4), (4, 150), (150, 150), (150, 4)])
    ]
    densities = []
    for rounds in (1, 30):
        model = linear_network(wide)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparsity 0.999 leaves nothing of these weights")
            pk.prune(model, 0.999, criterion=SynFlow(rounds=rounds), allocation="global", keep_one=False)
        densities.append([np.count_nonzero(kernel) for kernel in model.get_weights()])
    assert min(densities[0]) == 0 and min(densities[1]) > 0 and sum(densities[0]) == sum(densities[1])


def test_synflow_is_not_repaired_with_data(samples):
    report = pk.prune(network(), 0.5, samples, criterion="synflow", allocation="uniform")
    assert report.layer_errors == () and any("SynFlow" in note and "not read" in note for note in report.notes)
    with pytest.raises(ValueError, match="Received: .*SynFlow.* selects in 100 rounds"):
        pk.prune(network(), 0.5, samples, criterion="synflow", repair="weights", allocation="uniform")


def test_a_criterion_prunes_in_one_round_unless_it_says_otherwise():
    assert Magnitude().rounds == 1 and SynFlow().rounds == 100


@pytest.mark.parametrize("name", [name for name in NAMES if "data" in sources_of(CRITERIA[name].needs)])
def test_each_criterion_that_reads_data_is_refused_without(name):
    with pytest.raises(ValueError, match="is collected from data. Received: no data. Pass `data`"):
        pk.prune(network(), 0.5, criterion=name, allocation="uniform")
