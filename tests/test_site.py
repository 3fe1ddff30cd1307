"""The documentation as a site: builds without warnings and without other hosts, and describes every public name."""

import html
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import prunekit
from prunekit.cli import cli

ROOT = Path(__file__).parent.parent
GROUPS = [
    "allocations", "criteria", "errors", "patterns", "penalties", "policies", "ranges", "reports", "schedules"
]  # fmt: skip
PUBLIC_MODULES = [
    "prunekit",
    "prunekit.gradients",
    "prunekit.loops",
    "prunekit.initializers",
    "prunekit.distribution",
    *(f"prunekit.{name}" for name in GROUPS),
]
pytest.importorskip("mkdocs", reason="mkdocs is in the extra `docs`")


def build(folder, *options):
    """Runs MkDocs with the arguments of scripts/docs."""
    (arguments,) = re.findall(r'python -m mkdocs (.*) "\$@"', (ROOT / "scripts" / "docs").read_text(encoding="utf-8"))
    command = [sys.executable, "-m", "mkdocs", *arguments.split(), "--site-dir", str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def configuration(folder, **settings):
    """Writes a site of few pages under the rules of the project; plugins and generated pages take most of the time."""
    own = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": "docs",
        "theme": "mkdocs",
        "plugins": [],
        "hooks": [],
        "nav": [],
    }
    (folder / "mkdocs.yml").write_text(yaml.safe_dump({**own, **settings}))
    return folder / "mkdocs.yml"


def anchors(site, page):
    return set(re.findall(r'\bid="([^"]+)"', (site / page).read_text(encoding="utf-8")))


@pytest.mark.parametrize("module", [*PUBLIC_MODULES, "prunekit.interop.tfmot"])
def test_the_reference_describes_every_public_name(site, module):
    last = module.rpartition(".")[2]
    # `pk.initializers` is a public name that is defined elsewhere.
    owner = getattr(prunekit, last) if last in prunekit.__all__ else importlib.import_module(module)
    names = [name for name in owner.__all__ if f"{module}.{name}" not in PUBLIC_MODULES]
    missing = {f"{module}.{name}" for name in names} - anchors(site, f"reference/{last}.html")
    assert names and not missing


def test_the_reference_begins_with_functions(site):
    text = (site / "reference" / "prunekit.html").read_text(encoding="utf-8")
    found = re.findall(r'<h[23] id="([\w.-]+)"', text)
    places = [
        found.index(name) for name in ("prunekit.prune", "prunekit.shrink", "classes", "prunekit.PruningCallback")
    ]
    assert found[0] == "functions" and places == sorted(places)


def test_every_public_module_is_one_of_those_above():
    modules = {f"prunekit.{name}" for name in prunekit.__all__ if type(getattr(prunekit, name)) is type(prunekit)}
    assert modules == set(PUBLIC_MODULES) - {"prunekit"}


def test_the_reference_shows_arguments_and_sources_of_the_docstrings(site):
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "reference" / "gradients.html").read_text(encoding="utf-8")))
    assert "Parameters:" in text and "Source:" in text and "arXiv:1510.01799" in text


def test_the_reference_describes_every_command(site):
    text = (site / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert all(f"Usage: prunekit {name}" in text for name in cli.commands)


def test_pages_load_nothing_from_other_hosts(site):
    loading = re.compile(
        r"""<(?:script|img|iframe|source)[^>]+src=["']?(?:https?:)?//|<link[^>]+href=["']?(?:https?:)?//"""
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    assert [page.name for page in pages if loading.search(page.read_text(encoding="utf-8"))] == []
    assert [
        file.name for file in site.rglob("*.css") if re.search(r"url\(['\"]?(?:https?:)?//", file.read_text())
    ] == []


def test_the_search_finds_every_page_without_a_server(site):
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    entries = json.loads(script.removeprefix("var __index = "))["docs"]
    found = {entry["location"].partition("#")[0] for entry in entries}
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html"}
    assert pages - found == set()
    titles = {html.unescape(re.sub(r"<[^>]+>", "", entry["title"])) for entry in entries}
    for page in sorted((ROOT / "docs" / "how-to").glob("*.md")):
        assert page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").replace("`", "") in titles


def test_links_from_the_first_page_lead_to_pages(site):
    targets = re.findall(r'href="([^":#]+)', (site / "index.html").read_text(encoding="utf-8"))
    assert {"training.html", "security.html", "changelog.html"} <= set(targets)
    assert [target for target in targets if not (site / target).exists()] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a](b.md)", "'b.md', but the target is not found"),
        ("[a](#nowhere)", "there is no such anchor"),
        ("[a](../scripts/demo)", "unrecognized relative link '../scripts/demo'"),
    ],
    ids=["page", "anchor", "file beside docs"],
)
def test_a_broken_link_ends_the_build(text, message, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{text}\n")
    done = build(tmp_path / "site", "--config-file", str(configuration(tmp_path)))
    assert done.returncode == 1 and message in done.stderr


def test_a_notebook_becomes_a_page_with_its_stored_outputs(tmp_path):
    pytest.importorskip("nbconvert", reason="nbconvert is in the extra `docs`")
    picture = {"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo="}, "metadata": {}}
    printed = {"output_type": "stream", "name": "stdout", "text": "0.9\n"}
    cell = {"cell_type": "code", "id": "b", "source": "1 / 0", "outputs": [printed, picture]}
    cells = [
        {"cell_type": "markdown", "id": "a", "source": "# A notebook", "metadata": {}},
        {**cell, "execution_count": 1, "metadata": {}},
    ]
    (tmp_path / "docs" / "tutorials").mkdir(parents=True)
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[a notebook](tutorials/first.ipynb)\n")
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "docs" / "tutorials" / "first.ipynb").write_text(json.dumps(notebook))
    # The hook of the project, without its other pages.
    folder = str(ROOT / "scripts" / "site")
    lines = ["import sys", f"sys.path.insert(0, {folder!r})", "from pages import notebook_pages, on_page_markdown"]
    lines += ["def on_files(files, config):", "    notebook_pages(files, config)", "    return files"]
    (tmp_path / "hook.py").write_text("\n".join(lines))
    done = build(tmp_path / "site", "--config-file", str(configuration(tmp_path, hooks=[str(tmp_path / "hook.py")])))
    page = (tmp_path / "site" / "tutorials" / "first" / "index.html").read_text()
    assert done.returncode == 0, done.stderr
    assert all(part in page for part in (">A notebook", "1 / 0", "0.9", 'src="../')) and "iVBOR" not in page
