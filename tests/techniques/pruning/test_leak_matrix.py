"""The leak matrix in the test suite: on each backend, a subset in which every pair of values occurs, or nearly."""

import contextlib
import gc
import re

import keras
import pytest
from backends import BACKEND
from leak_loops import OWN_LOOP
from leak_matrix import (
    ABSENT,
    LOOPS,
    OPTIMIZERS,
    THIN,
    VARIANTS,
    Cell,
    Outcome,
    cover,
    exists,
    kind_of,
    moving_cover,
    pairs,
    product,
    run_cell,
    run_cells,
    short_cover,
    way_of,
)

from prunekit.core.runtime import patching
from prunekit.techniques.pruning.masks import mask_calculator
from prunekit.techniques.pruning.masks.mask_store import MaskStore

pytestmark = pytest.mark.every_backend

CELLS = cover()
SHORT = short_cover()
MOVING_CELLS = moving_cover()


@pytest.fixture(scope="module")
def outcomes(request) -> dict[Cell, Outcome]:
    """Of the cells that are tested here."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cells = [item.callspec.params["cell"] for item in items if "cell" in item.callspec.params]
    # This process now waits for a minute, in which the system takes memory back: see tests/conftest.py.
    gc.collect()
    gc.freeze()
    return {outcome.cell: outcome for outcome in run_cells(cells, jobs=2)}


@contextlib.contextmanager
def _shadow_for_good(owner, name, value):
    vars(owner)[name] = value
    yield


def subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def test_the_walk_finds_every_optimizer_that_keras_defines():
    defined = {
        one for one in subclasses(keras.optimizers.Optimizer) if one.__module__.startswith("keras.src.optimizers.")
    }
    assert set(OPTIMIZERS.values()) == defined
    assert {"SGD", "Adam", "Muon", "LossScaleOptimizer", "MultiOptimizer"} <= set(OPTIMIZERS)


def test_every_pair_of_values_occurs_in_the_subset():
    wanted = set().union(*(pairs(cell) for cell in product()))
    assert set().union(*(pairs(cell) for cell in CELLS)) == wanted
    # Said once more without `pairs`, which the subset was made with.
    for optimizer in OPTIMIZERS:
        variants = {cell.variant for cell in CELLS if cell.optimizer == optimizer}
        existing = {variant for variant in VARIANTS if exists(optimizer, variant)}
        assert (variants < existing and len(variants) >= 3) if THIN else variants == existing
        assert {cell.loop for cell in CELLS if cell.optimizer == optimizer} == set(LOOPS)
    for variant in VARIANTS.keys() - ABSENT:
        assert {cell.loop for cell in CELLS if cell.variant == variant} == set(LOOPS)


def test_the_subset_is_the_same_each_time_and_no_cell_is_in_it_twice():
    assert CELLS == cover()
    assert len(CELLS) == len(set(CELLS))


def test_the_short_suite_tries_each_value_of_each_axis():
    assert set(SHORT) < set(CELLS) and len(SHORT) == len(set(SHORT)) <= len(CELLS) / 3
    assert {cell.optimizer for cell in SHORT} == set(OPTIMIZERS)
    assert {cell.variant for cell in SHORT} == VARIANTS.keys() - ABSENT
    assert {cell.loop for cell in SHORT} == set(LOOPS)
    if BACKEND == "tensorflow":
        kinds = {(kind_of(cell.optimizer), way_of(cell.loop)) for cell in SHORT}
        assert kinds == {(kind_of(optimizer), way_of(loop)) for optimizer in OPTIMIZERS for loop in LOOPS}


def test_only_momentum_is_missing_anywhere():
    variants = VARIANTS.keys() - ABSENT
    missing = {
        (optimizer, variant) for optimizer in OPTIMIZERS for variant in variants if not exists(optimizer, variant)
    }
    assert {variant for _, variant in missing} == {"momentum"}
    assert not {"SGD", "RMSprop", "Muon"} & {optimizer for optimizer, _ in missing}


# What is taken out of prunekit, where that shows, and what the matrix says.
SABOTAGES = {
    "gradients are not masked": (
        Cell("SGD", "momentum", "train_on_batch"),
        (MaskStore, "mask_gradients", lambda self, gradients, variables: list(gradients)),
        "momentum are not 0",
    ),
    "weights are not masked": (
        Cell("Muon", "plain", OWN_LOOP),
        (MaskStore, "after_update", lambda self, *_: self._updates.assign_add(1)),
        "kernel are not 0",
    ),
    "slots are not cleared": (
        Cell("Adam", "plain", "fit"),
        (MaskStore, "_slots", lambda *_: []),
        "pruned positions of adam/.* are not 0",
    ),
    "one weight too few is pruned": (
        Cell("SGD", "plain", "custom train_step"),
        (mask_calculator, "removed_count", lambda sparsity, n, keep_one: round(sparsity * n) - 1),
        "are pruned; .* was asked for",
    ),
    "the optimizer keeps an attribute": (
        Cell("SGD", "plain", "fit after fit"),
        (patching, "shadowed", _shadow_for_good),
        # On JAX an optimizer in a scope also saves and loads its variables otherwise.
        "the optimizer has {.*'apply'.*} that it had not"
        if BACKEND == "jax"
        else "the optimizer has {'apply'} that it had not",
    ),
}


@pytest.mark.parametrize("name", SABOTAGES)
@pytest.mark.short(cases=3)
@pytest.mark.every_backend(cases=0)
def test_the_matrix_notices_when(name, monkeypatch):
    cell, sabotage, message = SABOTAGES[name]
    monkeypatch.setattr(*sabotage)
    outcome = run_cell(cell)
    assert outcome.status == "failed"
    assert re.search(message, outcome.reason), outcome.reason


@pytest.mark.every_backend(cases=len(SHORT))
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=str(cell), marks=[] if cell in SHORT else [pytest.mark.thorough]) for cell in CELLS],
)
def test_nothing_leaks(cell, outcomes):
    outcome = outcomes[cell]
    assert outcome.status in ("ok", "keras"), outcome.reason
    if outcome.status == "ok":
        assert outcome.positions > 1000


@pytest.mark.every_backend(cases=0)
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=[pytest.mark.thorough]) for cell in MOVING_CELLS]
)
def test_nothing_leaks_while_masks_move(cell, outcomes):
    outcome = outcomes[cell]
    assert outcome.status in ("ok", "keras"), outcome.reason
    if outcome.status == "ok":
        assert outcome.positions > 1000


def test_what_keras_refuses_without_prunekit_is_known(outcomes):
    refused = {(o.cell.variant, o.cell.loop): o.reason for o in outcomes.values() if o.status == "keras"}
    assert not refused


@pytest.mark.parametrize("argument", ["clipnorm", "global_clipnorm", "weight_decay", "gradient_accumulation_steps"])
@pytest.mark.one_backend
def test_keras_refuses_options_on_a_loss_scale_optimizer_itself(argument):
    with pytest.raises(ValueError, match=f"set `{argument}` on the `inner_optimizer`"):
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), **{argument: 2})
