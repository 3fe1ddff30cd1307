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
PUBLIC_MODULES = ["prunekit", "prunekit.gradients", "prunekit.loops", "prunekit.initializers", "prunekit.distribution"]
pytest.importorskip("mkdocs", reason="mkdocs is in the extra `docs`")


def build(folder, *options):
    """Runs `mkdocs build --strict` as scripts/docs does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


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
    # The rules are those of the project; plugins and generated pages take most of the time.
    own = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": "docs",
        "theme": "mkdocs",
        "plugins": [],
        "hooks": [],
        "nav": [],
    }
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(own))
    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode == 1 and message in done.stderr
