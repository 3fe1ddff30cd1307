"""Recipes by their name and by their path."""

from pathlib import Path

import pytest
from sample_recipe import TEXT

from prunekit.recipe.text.loader import RecipeError, builtin_recipes, find_recipe, load_recipe


class TestFindingRecipes:
    def test_built_in_recipes_are_found_and_right(self):
        assert {"digits", "fashion-cnn", "fashion-mlp", "one-shot"} <= set(builtin_recipes())
        for name, path in builtin_recipes().items():
            assert load_recipe(name) == load_recipe(path)
            assert load_recipe(name).name == name
            assert load_recipe(name).description

    def test_every_variable_of_a_built_in_recipe_can_be_set(self):
        for name in builtin_recipes():
            variables = load_recipe(name).variables
            assert load_recipe(name, variables).variables == variables

    def test_a_file_comes_before_a_built_in_recipe(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("digits").write_text(TEXT)
        assert load_recipe("digits").name == "sample"

    def test_a_folder_does_not_hide_a_built_in_recipe(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("digits").mkdir()
        assert find_recipe("digits").name == "digits.yaml"

    @pytest.mark.parametrize("name", ["digts", "digits.yaml", "x" * 5000, "", "a\0b", "no/such/file"])
    def test_a_missing_file_is_one_line(self, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(RecipeError) as caught:
            load_recipe(name)
        assert "\n" not in str(caught.value)

    def test_a_near_miss_is_named(self):
        with pytest.raises(RecipeError, match="digts: no such file.*Did you mean 'digits'"):
            load_recipe("digts")

    def test_a_folder_is_refused(self, tmp_path):
        with pytest.raises(RecipeError, match="a folder, not a recipe"):
            load_recipe(tmp_path)
