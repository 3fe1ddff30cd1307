"""Recipes that name code: it runs only where it is trusted."""

import pytest
from sample_recipe import TEXT

from prunekit.recipe.text.loader import RecipeError, require_trust


class TestTrust:
    FACTORIES = (
        "version: 1\nmodel: {factory: 'my.models:build'}\ndata: {factory: 'my.data:load'}\n"
        "steps: [prune: {sparsity: 0.5}]\n"
    )

    def test_code_is_refused_and_named(self, load):
        with pytest.raises(RecipeError, match=r"model: my\.models:build, data: my\.data:load.*--trust"):
            require_trust(load(self.FACTORIES), trust=False)

    def test_trusted_code_is_let_through(self, load):
        assert require_trust(load(self.FACTORIES), trust=True) is None

    def test_only_what_would_run_is_named(self, load):
        with pytest.raises(RecipeError, match=r"\(data: my\.data:load\)"):
            require_trust(load(self.FACTORIES), trust=False, model_given=True)
        require_trust(load(self.FACTORIES), trust=False, model_given=True, data_given=True)

    def test_a_recipe_without_code_needs_no_trust(self, load):
        assert load(TEXT).factories() == ()
        assert require_trust(load(TEXT), trust=False) is None

    def test_loading_imports_nothing(self, load, tmp_path, monkeypatch):
        (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
        monkeypatch.syspath_prepend(tmp_path)
        assert load(TEXT.replace("{builtin: digits-cnn}", "{factory: 'trap:f'}")).factories() == ("model: trap:f",)
