"""Every Python block of the README and the docs runs, in order, one namespace per page."""

import re
import shlex
from pathlib import Path

import pytest

from prunekit import cli
from prunekit.recipe.text.loader import load_recipe
from prunekit.sparsity.shorthands import ALLOCATIONS, CRITERIA, POLICIES, STATISTICS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages whose blocks take more than five seconds.
LONG = (
    "coming-from-tfmot export gradients initial-weights loops measured-losses models quantizing recipe-to-phone "
    "resuming shrinking sweeps training-for-removal"
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "tutorials"], ids=lambda page: page.name
)
def test_a_tutorial_runs_from_top_to_bottom_in_both_languages(page, tmp_path, monkeypatch):
    """Commands of prunekit and Python blocks, in the order of the page."""
    monkeypatch.chdir(tmp_path)
    for name, text in NAMED.findall(page.read_text()):
        Path(name).write_text(text)
    namespace = {"__name__": "__page__"}
    ran = set()
    for language, block in re.findall(r"^```(python|sh)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        ran.add(language)
        if language == "python":
            exec(compile(block, str(page), "exec"), namespace)
        for line in block.splitlines() if language == "sh" else ():
            program, *arguments = shlex.split(line, comments=True) or [""]
            if program == "prunekit":
                assert cli.run([one for one in arguments if one != "--open"]) == 0, line
    assert ran


@pytest.mark.parametrize("page", [page for page in PAGES if "```yaml" in page.read_text()], ids=lambda page: page.name)
def test_the_recipes_of_a_page_are_valid(page, tmp_path):
    for i, text in enumerate(re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)):
        file = tmp_path / f"{i}.yaml"
        file.write_text(text)
        assert load_recipe(file).steps


def test_the_long_pages_are_pages():
    assert {page.stem for page in PAGES if CODE[page]} > set(LONG)


def test_the_readme_shows_pruning_in_fit_and_once_and_what_keeps_the_zeros():
    code = "".join(CODE[ROOT / "README.md"])
    assert [name for name in ("pk.PruningCallback(", "pk.prune(", "pk.KeepZeros(") if name not in code] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        (
            "leak-matrix",
            r"Cells run: ([\d,]+) of .*Values checked at pruned positions, in weights and slots: ([\d,]+)\.",
        ),
        ("benchmarks", r"adds to its step:.*?\| prunekit \| (\d+).*?\| tensorflow-model-optimization \| (\d+)"),
        ("measured/quantization", r"ResNet-8 \| 4-bit[^|]* nearest \| (\S+).*?ResNet-8 \| 4-bit[^|]* GPTQ \| (\S+)"),
    ],
    ids=["leaks", "mask update", "few bits"],
)
def test_the_figures_of_the_readme_are_the_measured_ones(page, pattern):
    measured = re.search(pattern, (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL).groups()
    table = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert [figure for figure in measured if not re.search(rf"(?<![\d.,]){figure}(?![\d.])", table)] == []


def test_what_one_call_keeps_is_what_was_measured():
    page = (ROOT / "docs" / "measured" / "defaults.md").read_text()
    section = (ROOT / "README.md").read_text().partition("## What one call keeps")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| .*0\.\d{4} \|$", line)]
    assert len(rows) >= 5 and [row for row in rows if row not in page] == []


def test_the_readme_has_two_screens_and_begins_with_what_to_call():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    assert next(line for line in lines if line.startswith(("|", "#", "```")) and line != "# prunekit").startswith(
        "| You have a Keras model and want"
    )
