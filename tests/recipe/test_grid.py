"""The grid of a sweep: which points, with which names, and what is refused before anything runs."""

import itertools

import pytest
import sweep_stand_in

from prunekit.recipe.text.grid import MOST_POINTS, grid, read_values
from prunekit.recipe.text.loader import RecipeError, load_recipe


@pytest.fixture
def recipe(tmp_path):
    """A recipe with the variables final, kind and width."""
    (tmp_path / "small.yaml").write_text(sweep_stand_in.RECIPE)
    return tmp_path / "small.yaml"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.5,0.8", [0.5, 0.8]),
        (" 0.5 , 8 ", [0.5, 8]),
        ("true,null,~,no,2:4", [True, None, None, "no", "2:4"]),
        ("'a,b',\"c\\\",d\",'it''s'", ["a,b", 'c",d', "it's"]),
        ("1e-3", [0.001]),
        ("'0.5'", ["0.5"]),
    ],
)
def test_values_are_read_as_the_recipe_reads_them(text, values):
    found = read_values(text)
    assert found == values and list(map(type, found)) == list(map(type, values))


@pytest.mark.parametrize("text", ["", ",", "0.5,", "0.5,,0.8", ",0.5", "  "])
def test_an_empty_value_is_refused(text):
    with pytest.raises(RecipeError, match="expected values with commas between them, and one is empty"):
        read_values(text)


@pytest.mark.parametrize("text", ["'a,b", '"a', "0.5,.nan", "'a'b"])
def test_a_value_that_is_none_is_refused(text):
    with pytest.raises(RecipeError):
        read_values(text)


def test_every_combination_is_a_point_and_the_last_variable_changes_fastest(recipe):
    points = grid(recipe, {"final": [0.8, 0.5], "width": (16, 32)}, {"kind": "unmet"})
    assert [point.name for point in points] == [
        "final=0.8,width=16",
        "final=0.8,width=32",
        "final=0.5,width=16",
        "final=0.5,width=32",
    ]
    for found, (final, width) in zip(points, itertools.product([0.8, 0.5], [16, 32]), strict=True):
        assert found.values == {"final": final, "width": width}
        assert found.recipe == load_recipe(recipe, {"final": final, "width": width, "kind": "unmet"})


def test_names_are_folders_of_their_own_on_any_file_system():
    source = {
        "version": 1,
        "variables": {"text": ""},
        "description": "$text",
        "steps": [{"prune": {"sparsity": 0.5}}],
    }
    hostile = ["a/b", "../..", "a b", "a:b", "a,x=1", "%2F", "", "ä", "x" * 500, "x" * 501, "*", "\\", "a", "A"]
    points = grid(source, {"text": hostile})
    assert len({found.name for found in points}) == len(hostile)
    for found in points:
        assert len(found.name) <= 120 and set(found.name) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789=%._-+~"
        )


@pytest.mark.parametrize(
    ("over", "overrides", "message"),
    [
        ({}, {}, "a sweep needs at least one variable to go over"),
        ({"final": []}, {}, r"values of 'final' to sweep over: expected at least one value. Received: none"),
        ({"final": "0.5,0.8"}, {}, r"values of 'final' to sweep over: expected a list of values. Received: '0.5,0.8'"),
        ({"final": 0.5}, {}, "expected a list of values. Received: 0.5"),
        ({"final": [0.5, 0.8, 0.5]}, {}, "0.5 is given twice"),
        ({"width": [1, 1.0]}, {}, "1 is given twice"),
        ({"final": [0.5]}, {"final": 0.8}, "variable 'final' is set to one value, and swept over several"),
        ({"fnal": [0.5]}, {}, "variable 'fnal' is set, but not declared under 'variables'. Did you mean 'final'"),
        ({"final": [0.5, 0.8, 1.5]}, {}, r"small.yaml:7:\d+: .*Received: 1.5.* \(At the point final=1.5.\)"),
        ({"final": [0.5, [0.8]]}, {}, "expected text, a number, true or false. Received: a list"),
        ({"final": [0.5, float("nan")]}, {}, "At the point final=nan"),
        ({"kind": ["1", 1]}, {}, "expected text. Received: 1"),
        ({"width": range(1, 1002)}, {}, f"expected at most {MOST_POINTS:,} points. Received: 1,001"),
        ({"width": range(1, 2000), "final": [0.5, 0.8]}, {}, "Received: 3,998. Split it into several sweeps"),
    ],
)
def test_a_mistake_at_any_point_is_one_located_line(recipe, over, overrides, message):
    with pytest.raises(RecipeError, match=message) as caught:
        grid(recipe, over, overrides)
    assert "\n" not in str(caught.value)


def test_values_that_differ_in_kind_alone_would_share_a_folder():
    source = {
        "version": 1,
        "variables": {"a": 1},
        "model": {"factory": "m:f", "arguments": {"a": "$a"}},
        "steps": [{"prune": {"sparsity": 0.5}}],
    }
    with pytest.raises(RecipeError, match="two points have the name a=1: their values differ only in type"):
        grid(source, {"a": [1, "1"]})
    assert [found.name for found in grid(source, {"a": [1, True, None]})] == ["a=1", "a=true", "a=null"]


def test_a_long_list_of_values_is_read_at_once():
    # Spaces before something else than a comma: a pattern that goes back over them takes hours.
    text = "a" + " " * 100_000 + "b"
    assert read_values(f" {text}  , 0.5 ,'x, y' ") == [text, 0.5, "x, y"]


@pytest.mark.parametrize("over", [None, 3, [1], "final=1"], ids=repr)
def test_variables_that_are_no_mapping_are_refused(over):
    with pytest.raises(TypeError, match="`over` is a mapping of variables to lists of values. Received: "):
        grid("one-shot", over)
