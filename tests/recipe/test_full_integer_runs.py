"""Whole runs of recipes with `full_integer: true`: nothing of the file computes in floating point."""

import json

import keras
import numpy as np
import pytest
from integer_files import float_operations, graph_of_file
from keras import layers as L
from tiny_recipes import recipe

from prunekit.recipe.run.runner import compress, plan

SAMPLES = np.random.default_rng(3).normal(size=(70, 4, 6)).astype("float32"), np.arange(70) % 3
PAIRS = SAMPLES, SAMPLES


def network():
    """Returns a classifier of which normalization and attention compute in floating point unless told otherwise."""
    keras.utils.set_random_seed(5)
    x = keras.Input((4, 6), name="x")
    y = L.LayerNormalization(name="norm")(L.Dense(6, name="first")(x))
    y = L.MultiHeadAttention(2, 3, name="attention")(y, y)
    return keras.Model(x, L.Dense(3, name="logits")(L.GlobalAveragePooling1D()(y)), name="words")


def steps(**settings):
    """Returns a recipe that trains, quantizes and exports."""
    quantize = {"examples": 64, **settings}
    return recipe({"train": {"epochs": 1}}, {"quantize": quantize}, {"export": {"formats": ["keras"]}})


def planned_sections(given):
    """Returns the tables of the planned step quantize."""
    return [{"title": one.title, "rows": one.rows} for one in plan(given, network(), PAIRS).steps[1].sections]


def floats_of(sections):
    """Returns the rows of what computes in floating point."""
    return [row for one in sections if one["title"] == "In floating point" for row in one["rows"]]


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("settings", [{}, {"epochs": 1}], ids=["after training", "in training"])
def test_plan_report_and_file_of_a_run_have_nothing_in_floating_point(tmp_path, settings):
    given = steps(full_integer=True, **settings)
    without, planned = (planned_sections(one) for one in (steps(**settings), given))
    assert "norm" in {row[0] for row in floats_of(without)} and floats_of(planned) == []
    compress(given, network(), PAIRS, tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    rows = {row["format"]: row for row in report["exports"]}
    assert {name: row["status"] for name, row in rows.items()} == {"litert-integer": "ok", "keras": "ok"}
    assert float_operations(graph_of_file(tmp_path / "run" / "exports" / rows["litert-integer"]["file"])) == []
    assert floats_of(report["steps"][1]["sections"]) == []
    assert report["steps"][1]["metrics"]["loss"] == pytest.approx(report["steps"][0]["metrics"]["loss"], rel=0.1)
