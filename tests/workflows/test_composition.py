"""Every pair of steps: refused as docs/composition.md says, or run; what the first step leaves stays, also resumed."""

from functools import cache
from itertools import product
from pathlib import Path

import keras
import numpy as np
import pytest
from backends import sync_model_state
from tiny_recipes import Stop, one_shot, recipe, resumed

from prunekit.anatomy.files.digests import weight_arrays
from prunekit.recipe.run.runner import compress
from prunekit.recipe.settings.step_kinds import STEP_KINDS
from prunekit.recipe.text.loader import RecipeError, load_recipe

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"
CLUSTERS, SPARSITY = 8, 0.5
STEPS = {
    "train": {"train": {"epochs": 1}},
    "prune": one_shot(SPARSITY),
    "shrink": {"shrink": {"channels": 0.75}},
    "simplify": {"simplify": {}},
    "factorize": {"factorize": {"parameters": 0.7}},
    "cluster": {"cluster": {"clusters": CLUSTERS}},
    "quantize": {"quantize": {}},
    "search": {"search": {"drop": 0.5}},
}
PAIRS = [pair for pair in product(STEPS, STEPS) if pair not in (("train", "train"), ("simplify", "simplify"))]


def table():
    """{(first, second): cell} of the page."""
    lines = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    begin = next(i for i, line in enumerate(cells) if line[0] == "first")
    _, *seconds = cells[begin]
    rows = {line[0]: line[1:] for line in cells[begin + 2 : begin + 2 + len(STEPS)]}
    return {(first, second): row[i] for first, row in rows.items() for i, second in enumerate(seconds)}


def allowed():
    return [pair for pair in PAIRS if table()[pair] != "–"]


def cnn():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, use_bias=False, name="conv_1"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="conv_2"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(24, activation="relu", name="hidden"),
            layers.Dense(5, name="logits"),
        ]
    )


def residual():
    keras.utils.set_random_seed(2)
    layers = keras.layers
    inputs = x = keras.Input((8, 8, 1))
    x = layers.Flatten()(x)
    x = layers.Dense(32, activation="relu", name="first")(x)
    y = layers.Dense(32, name="second")(x)
    y = layers.BatchNormalization(name="norm")(y)
    x = layers.Add()([x, layers.ReLU()(y)])
    x = layers.Dropout(0.1, seed=3)(x)
    x = layers.Dense(24, activation="tanh", name="third")(x)
    return keras.Model(inputs, layers.Dense(5, name="logits")(x))


NETWORKS = {"cnn": cnn, "residual": residual}


@cache
def data():
    rng = np.random.default_rng(0)
    # A search needs 128 examples.
    x, y = rng.random((160, 8, 8, 1), dtype="float32"), rng.integers(0, 5, 160)
    return (x[:128], y[:128]), (x[128:], y[128:])


def pair_recipe(first, second):
    return recipe(*(STEPS[name] for name in (first, second)))


def kernels(model):
    sync_model_state(model)
    return {name: array for name, array in weight_arrays(model).items() if array.ndim > 1}


def left_by_first(first, second, model, alone):
    """Asserts that what the first step leaves is in the model after both; `alone` is the model after the first."""
    now, before = kernels(model), kernels(alone)
    if first == "prune":
        same = [name for name in now if name in before and now[name].shape == before[name].shape]
        # A removal of channels changes the shape of every kernel of a plain network.
        assert same or second in ("shrink", "search")
        for name in same:
            assert not now[name][before[name] == 0].any(), name
        assert sum((array == 0).sum() for array in now.values()) >= 0.9 * SPARSITY * sum(
            array.size for array in now.values()
        )
    elif first == "cluster":
        counts = {name: len(np.unique(array)) for name, array in now.items()}
        # Scales of output channels are multiplied after the codes: few values in each channel.
        rows = {name: max(len(np.unique(array[..., o])) for o in range(array.shape[-1])) for name, array in now.items()}
        assert max((rows if second == "quantize" else counts).values()) <= CLUSTERS
    elif first == "factorize":
        assert len(now) >= len(before) > len(kernels(NETWORKS_OF[id(alone)]()))
        assert model.count_params() <= alone.count_params() or second == "factorize"


NETWORKS_OF: dict = {}


@pytest.mark.one_backend
def test_the_table_has_all_pairs_of_steps():
    found = table()
    assert set(found) == set(product(STEPS, STEPS))
    assert set(STEPS) == STEP_KINDS.keys() - {"finetune", "export", "pack", "expect", "rounds", "remove_blocks"}
    leaves = {name: STEP_KINDS[name].settings.leaves for name in STEPS}
    for (first, second), cell in found.items():
        if cell and cell != "–":
            assert cell == ("yes" if leaves[first] is None else leaves[first].name), (first, second)


@pytest.mark.one_backend
@pytest.mark.short(cases=16)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_pair_is_refused_where_the_table_says_so(pair):
    if table()[pair] != "–":
        assert len(load_recipe(pair_recipe(*pair), data_given=True).steps) == 2
        return
    kept = STEP_KINDS[pair[0]].settings.leaves.step
    with pytest.raises(RecipeError, match=f"Write the {kept} step after this one"):
        load_recipe(pair_recipe(*pair), data_given=True)


SHORT = [("prune", "train", "cnn"), ("factorize", "prune", "residual"), ("cluster", "train", "cnn")]


@pytest.mark.every_backend(cases=len(SHORT))
@pytest.mark.parametrize(
    ("first", "second", "network"),
    [
        pytest.param(*pair, network, marks=[] if (*pair, network) in SHORT else [pytest.mark.thorough])
        for pair in allowed()
        for network in NETWORKS
    ],
)
def test_a_pair_keeps_what_the_first_step_leaves_and_ends_equal_when_resumed(first, second, network, tmp_path):
    build = NETWORKS[network]
    steps = pair_recipe(first, second)
    whole = compress(steps, build(), data(), tmp_path / "whole")
    alone = compress(recipe(STEPS[first]), build(), data(), tmp_path / "alone").model
    NETWORKS_OF[id(alone)] = build
    left_by_first(first, second, whole.model, alone)
    again = resumed(steps, build, data(), tmp_path / "resumed", Stop(1))
    sync_model_state(again.model)
    for name, array in weight_arrays(whole.model).items():
        np.testing.assert_array_equal(weight_arrays(again.model)[name], array)
