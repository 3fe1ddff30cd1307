"""SECURITY.md's limits: its tables and the constants of the code say the same, and at each limit so much is taken."""

import ast
import importlib
import re
import struct
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

import prunekit
from prunekit.anatomy.files.archives import LIMITS
from prunekit.recipe.datasets.idx import _MOST_AXES, read_idx
from prunekit.recipe.settings.fields import DEEPEST_ARGUMENT, LONGEST_TEXT
from prunekit.recipe.settings.schema import MOST_STEPS, Recipe
from prunekit.recipe.text.grid import MOST_POINTS, grid
from prunekit.recipe.text.loader import RecipeError, dump_recipe, load_recipe
from prunekit.recipe.text.yaml_reader import LARGEST_FILE, LONGEST_MESSAGE, MOST_VALUES

PACKAGE = Path(prunekit.__file__).parent
PAGE = PACKAGE.parent / "SECURITY.md"
if not PAGE.is_file():
    pytest.skip("SECURITY.md lies beside the package in a checkout alone", allow_module_level=True)

ALLOWANCE = ["anatomy.files.archives:expanded_bytes", "anatomy.files.archives:expansion"]
# What each row of the tables stands for, in the order in which it names them.
ROWS = {
    "bytes of a file, and of the file with every default written out": ["recipe.text.yaml_reader:LARGEST_FILE"],
    "values, with aliases and variables written out": ["recipe.text.yaml_reader:MOST_VALUES"],
    "characters of all text, with aliases and variables written out": ["recipe.text.yaml_reader:LARGEST_FILE"],
    "aliases": ["recipe.text.yaml_reader:MOST_ALIASES"],
    "levels": ["recipe.text.yaml_reader:DEEPEST", "recipe.settings.fields:DEEPEST_ARGUMENT"],
    "characters of a number": ["recipe.text.yaml_reader:LONGEST_NUMBER"],
    "characters of a text field": ["recipe.settings.fields:LONGEST_TEXT"],
    "characters of a pattern for weights": ["recipe.settings.fields:LONGEST_PATTERN"],
    "characters of all regular expressions (`re:...`)": ["recipe.settings.fields:MOST_EXPRESSIONS"],
    "`-` in all patterns for weights with characters beyond ASCII (each may be a range)": [
        "recipe.settings.fields:MOST_WIDE_RANGES"
    ],
    "steps; right ones hold more values than that before": ["recipe.settings.schema:MOST_STEPS"],
    "points of a sweep": ["recipe.text.grid:MOST_POINTS"],
    "characters of an error message": ["recipe.text.yaml_reader:LONGEST_MESSAGE"],
    "members of a `.keras` or npz archive": ["anatomy.files.archives:members"],
    "bytes of all members, unpacked": ALLOWANCE,
    "bytes of the model's description, `config.json`": ["anatomy.files.archives:config_bytes"],
    "levels in it": ["anatomy.files.archives:config_levels"],
    "groups and arrays of weights": ["anatomy.files.archives:objects"],
    "bytes that all arrays of weights declare": ALLOWANCE,
    "bytes of weights that the described layers make": ALLOWANCE,
    "bytes of a gzip idx file, unpacked": ALLOWANCE,
    "axes of an idx file": ["recipe.datasets.idx:_MOST_AXES"],
    "characters of a number in a CSV file": ["recipe.datasets.csv_files:_LONGEST_NUMBER"],
    "pixels of an image": ["recipe.datasets.images:MOST_PIXELS"],
    "bytes of the description of a saved data set, `dataset_spec.pb`": ["recipe.datasets.saved:LARGEST_SPEC"],
    "bytes that a packed file becomes": [
        "delivery.packing.decoder:LARGEST",
        "delivery.packing.decoder:MOST_EXPANSION",
        "operations.pack:LARGEST_FILE",
    ],
    "tables of a packed file": ["delivery.packing.decoder:MOST_CONTEXTS"],
    "bytes of a report": ["recipe.state.directory:LARGEST_REPORT"],
}
# They bound what prunekit itself writes, or how long it computes, and refuse nothing that a file says.
NO_LIMITS_OF_FILES = {
    "core.statistics.input_scale:_LARGEST",
    "core.statistics.layer_products:_MOST_OF_A_LAYER",
    "delivery.integers.integer_writing:_LARGEST",
    "recipe.state.export_samples:_MOST",
    "techniques.pruning.policies.choices:_MOST_AT_ONCE",
    "training_tools.loops.levenberg_marquardt:_MOST",
    "core.data.synthetic_inputs:LARGEST",
    "core.layerwise.trials:LARGEST",
    "techniques.quantize.rounding.calibration:_LARGEST_CELL",
    "core.data.calibration:MOST_GENERATED",
    "recipe.settings.fields:LONGEST_SHOWN",
    "recipe.settings.fields:MOST_NEAREST",
    "recipe.settings.data_source:_MOST_LAYERS",
    "recipe.text.grid:_LONGEST_NAME",
    "recipe.steps.planned_counts:MOST_WEIGHTS_WITH_DATA",
    "delivery.reports.plot_data:MOST_BARS",
    "anatomy.records.sections:MOST_BARS",
    "delivery.reports.plot_data:MOST_HISTOGRAMS",
    "delivery.reports.terminal_report:_MOST_NAMES",
    "delivery.plots.sweep_plot:_LONGEST_LABEL",
    "doctor:_LONGEST_REASON",
    "interop.tfmot.schedule_adoption:_MOST_CALLS",
    "sparsity.arguments:LARGEST",
    "suggestions:_LONGEST_WORD",
    "training_tools.gradients.zeroth_order:_MOST_FEATURES",
}
CALLED = re.compile(r"_?(MOST|LONGEST|LARGEST|DEEPEST)(_[A-Z_]+)?")
NUMBER = re.compile(r"(\d[\d,]*)(?: (.iB))?")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def stated():
    """Row -> the numbers in its second column."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Limits\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    rows = [row for row in cells if row[0] != "what" and not row[0].startswith("---")]
    numbers = [
        [int(number.replace(",", "")) * UNITS.get(unit, 1) for number, unit in NUMBER.findall(row[1])] for row in rows
    ]
    return dict(zip([row[0] for row in rows], numbers, strict=True))


def value(place):
    module, name = place.split(":")
    if module == "anatomy.files.archives":
        return getattr(LIMITS, name)
    return getattr(importlib.import_module(f"prunekit.{module}"), name)


def test_every_row_agrees_with_the_code():
    assert stated() == {row: [value(place) for place in places] for row, places in ROWS.items()}


def test_every_limit_of_the_code_has_a_row():
    found = {f"anatomy.files.archives:{field.name}" for field in fields(LIMITS)}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            parts = (one for target in targets if target is not None for one in ast.walk(target))
            names = [one.id for one in parts if isinstance(one, ast.Name)]
            found |= {f"{module}:{name}" for name in names if CALLED.fullmatch(name)}
    assert found - NO_LIMITS_OF_FILES == {place for places in ROWS.values() for place in places}
    assert found >= NO_LIMITS_OF_FILES


# ---- at a limit, and one more: those that test_bad_recipes and test_hostile_* leave ----------------------------------


STEP = {"prune": {"sparsity": 0.5}}


def recipe(**more):
    return {"version": 1, "steps": [STEP], **more}


def arguments(value):
    return recipe(model={"factory": "a:b", "arguments": {"x": value}})


def refused(document, match, **options):
    with pytest.raises(RecipeError, match=match) as error:
        load_recipe(document, **options)
    assert str(error.value).isprintable() and len(error.value.message) <= LONGEST_MESSAGE


def nested(levels):
    """A number in so many lists."""
    return [nested(levels - 1)] if levels else 1


def test_levels_of_arguments():
    at_limit = nested(DEEPEST_ARGUMENT)
    assert load_recipe(arguments(at_limit)).model.arguments["x"] == at_limit
    for more in (nested(DEEPEST_ARGUMENT + 1), {"a": at_limit}, [1, at_limit]):
        refused(arguments(more), r"arguments\S*: expected at most 16 levels of lists and mappings")


def test_characters_of_a_text():
    assert load_recipe(recipe(description="ü" * LONGEST_TEXT)).description == "ü" * LONGEST_TEXT
    refused(recipe(description="ü" * (LONGEST_TEXT + 1)), r"description: .*at most 2000 characters")


def test_steps():
    assert len(Recipe.model_validate(recipe(steps=[STEP] * MOST_STEPS)).steps) == MOST_STEPS
    with pytest.raises(ValidationError, match="at most 1000 items"):
        Recipe.model_validate(recipe(steps=[STEP] * (MOST_STEPS + 1)))
    refused(recipe(steps=[STEP] * MOST_STEPS), "expected at most 5000 values")


def test_axes_of_an_idx_file(tmp_path):
    for axes in (_MOST_AXES, _MOST_AXES + 1):
        (tmp_path / "x").write_bytes(bytes([0, 0, 8, axes]) + struct.pack(">I", 1) * axes + b"\7")
        if axes == _MOST_AXES:
            assert read_idx(tmp_path / "x").shape == (1,) * axes
    with pytest.raises(RecipeError, match="is not an idx file"):
        read_idx(tmp_path / "x")


def test_points_of_a_sweep():
    document = recipe(variables={"s": 0.5}, steps=[{"prune": {"sparsity": "$s"}}])
    assert len(grid(document, {"s": [i / MOST_POINTS for i in range(MOST_POINTS)]})) == MOST_POINTS
    with pytest.raises(RecipeError, match=r"at most 1,000 points. Received: 1,001"):
        grid(document, {"s": [i / 2_000 for i in range(MOST_POINTS + 1)]})


def test_values_of_a_mapping():
    def document(count):
        return arguments([0] * count)

    base = next(n for n in range(MOST_VALUES, 0, -1) if accepted(document(n)))
    found = load_recipe(document(base))
    # With every default written out, as in the lock: that is what is counted, too.
    plain = found.model_dump(mode="json", exclude_none=True)
    assert counted(plain) == MOST_VALUES
    refused(document(base + 1), "could not be read again: expected at most 5000 values")


def accepted(document):
    try:
        return load_recipe(document)
    except RecipeError:
        return None


def counted(value):
    if isinstance(value, dict):
        return 1 + sum(1 + counted(item) for item in value.values())
    return 1 + sum(map(counted, value)) if isinstance(value, list | tuple) else 1


def test_characters_of_all_text_and_bytes_of_the_lock():
    def document(count):
        return arguments("x" * count)

    rest = len(dump_recipe(load_recipe(document(1))).encode()) - 1
    lock = dump_recipe(load_recipe(document(LARGEST_FILE - rest)))
    assert len(lock.encode()) == LARGEST_FILE
    refused(document(LARGEST_FILE - rest + 1), "could not be read again: expected a recipe of at most 64 KiB")


def test_characters_of_an_error():
    text = "x" * (LONGEST_MESSAGE - 10)
    assert RecipeError(text + "y" * 10).message == text + "y" * 10
    cut = RecipeError(text + "y" * 11).message
    assert len(cut) == LONGEST_MESSAGE and cut.endswith("yyy...")
