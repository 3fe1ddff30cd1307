"""Every Python block of the README and the docs runs, in order, one namespace per page."""

import re
from pathlib import Path

import pytest

from prunekit.recipe.loader import load_recipe
from prunekit.sparsity.shorthands import ALLOCATIONS, CRITERIA, POLICIES, STATISTICS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages whose blocks take more than five seconds.
LONG = (
    "coming-from-tfmot export gradients initial-weights loops measured-losses recipe-to-phone resuming simulator-loss "
    "sparse-litert sweeps"
).split()
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A recipe whose first line is the name of its file, which the page's code reads.
NAMED = re.compile(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = {page: FENCE.findall(page.read_text()) for page in PAGES}


@pytest.fixture(autouse=True)
def registries():
    """Removes the rows that a page registers."""
    known = [(registry, set(registry)) for registry in (ALLOCATIONS, CRITERIA, POLICIES, STATISTICS)]
    yield
    for registry, names in known:
        for name in set(registry) - names:
            registry.remove(name)


# What tensorflow-model-optimization does when a page imports it.
@pytest.mark.filterwarnings("ignore:distutils Version classes are deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.thorough] if page.stem in LONG else [])
        for page in PAGES
        if CODE[page]
    ],
)
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # It sets this too; pytest puts back what was there.
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    for name, text in NAMED.findall(page.read_text()):
        Path(name).write_text(text)
    namespace = {"__name__": "__page__"}
    for block in CODE[page]:
        before = page.read_text()[: page.read_text().index(block)].count("\n")
        # Padded, so that a traceback shows the line of the page.
        exec(compile("\n" * before + block, str(page), "exec"), namespace)
    assert namespace.keys() > {"__name__"}


@pytest.mark.parametrize("page", [page for page in PAGES if "```yaml" in page.read_text()], ids=lambda page: page.name)
def test_the_recipes_of_a_page_are_valid(page, tmp_path):
    for i, text in enumerate(re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)):
        file = tmp_path / f"{i}.yaml"
        file.write_text(text)
        assert load_recipe(file).steps


def test_the_long_pages_are_pages():
    assert {page.stem for page in PAGES if CODE[page]} > set(LONG)


def test_the_readme_has_its_examples():
    assert len(CODE[ROOT / "README.md"]) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
