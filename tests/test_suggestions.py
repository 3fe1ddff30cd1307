"""Suggestions for misspelt names: one search and one wording for options, layers, recipes and files."""

import pytest

from prunekit.suggestions import did_you_mean


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("hiden", ["hidden", "output"], " Did you mean 'hidden'?"),
        ("adma", ["adamax", "adam"], " Did you mean 'adam'?"),
        ("MAGNITUDE", ["magnitude", "random"], " Did you mean 'magnitude'?"),
        ("dense", ["Dense", "conv"], " Did you mean 'Dense'?"),
        ("tflite", ["litert", "keras", "onnx"], " Did you mean 'litert'?"),
        ("zzz", ["litert", "keras"], ""),
        ("", ["a"], ""),
        ("x", [], ""),
        ("x" * 10_000, ["y" * 10_000], ""),
    ],
)
def test_the_known_name_that_is_closest_is_suggested(name, known, hint):
    assert did_you_mean(name, known) == hint


def test_several_names_are_suggested_where_several_are_close():
    assert did_you_mean("conv", ["conv_1", "conv_2", "dense"], most=5) == " Did you mean 'conv_1', 'conv_2'?"
    assert did_you_mean("conv", ["conv_1", "conv_2", "dense"]) == " Did you mean 'conv_1'?"


def test_the_suggestion_is_quoted_as_the_caller_wants():
    assert did_you_mean("hiden", ["hidden"], write=str.upper) == " Did you mean HIDDEN?"
