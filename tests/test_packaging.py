"""Wheel and sdist: what they hold, and that the wheel works without the repository."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import prunekit

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
EXTRAS = PROJECT["optional-dependencies"]
# Extras for work on prunekit; the others are for users.
TOOLS = {"backends", "dev", "docs"}
# What a message tells to install, and the package that is then found.
INSTALLS = {
    "examples": "scikit-learn",
    "hub": "keras-hub",
    "legacy": "tf-keras",
    "notebook": "pandas",
    "ray": "ray",
}
# Packages that prunekit imports by a name in a string.
BY_NAME = {"keras_hub", "tensorflow_model_optimization", "tf_keras"}
# Files that lie in a checkout after some work, and belong to nobody else.
LITTER = (
    ".hypothesis/unicode_data/a",
    ".pytest_cache/a",
    ".venv/bin/python",
    "build/site/index.html",
    "mine.keras",
    "prunekit/__pycache__/cli.cpython-311.pyc",
    "runs/mine/model.keras",
)
# The keys of CFF 1.2.0.
CITATION_KEYS = set(
    "abstract authors cff-version commit contact date-released doi identifiers keywords license license-url message "
    "preferred-citation references repository repository-artifact repository-code title type url version".split()
)


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def build(source, target, kind):
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", target, cwd=source)
    (found,) = [path for path in target.iterdir() if path.suffix == {"wheel": ".whl", "sdist": ".gz"}[kind]]
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Paths of the wheel and the sdist, built from a copy of the tree that has been worked in."""
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source") / "tree"
    ignored = shutil.ignore_patterns(".git", ".*_cache", ".hypothesis", ".venv", "__pycache__", "build", "dist", "runs")
    shutil.copytree(ROOT, source, ignore=ignored)
    for name in LITTER:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("litter")
    return build(source, folder, "wheel"), build(source, folder, "sdist")


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_package_its_recipes_and_the_licence_and_nothing_else(built):
    names = set(contents(built[0]))
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "prunekit").rglob("*.py")}
    recipes = {f"prunekit/recipes/{name}.yaml" for name in RECIPES}
    data = {"prunekit/py.typed", "prunekit/delivery/pages/page.css"}
    assert len(recipes) >= 5
    about = {name for name in names if ".dist-info/" in name}
    assert names - about == modules | recipes | data
    assert any(name.endswith("licenses/LICENSE") for name in about)


def test_the_sdist_holds_the_project_and_no_caches_runs_or_models(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not names & set(LITTER)
    tops = {name.partition("/")[0] for name in names}
    folders = {".ci", "docs", "prunekit", "recipes", "scripts", "tests"}
    pages = {"CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"}
    always = {".gitignore", "CITATION.cff", "LICENSE", "PKG-INFO", "mkdocs.yml", "pyproject.toml"}
    assert tops == folders | pages | always


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    (tmp_path / "dist").mkdir()
    assert contents(build(source, tmp_path / "dist", "wheel")) == contents(built[0])


def test_the_installed_wheel_runs_without_the_repository(built, tmp_path):
    target, away = tmp_path / "installed", tmp_path / "away"
    away.mkdir()
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "install", *options, "--target", target, built[0])
    code = """
import contextlib, sys
import prunekit.cli as cli
for words in (["recipes"], ["check", "digits"]):
    with contextlib.suppress(SystemExit):
        cli.main(words)
    print("----")
print(*(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "prunekit"), sep="\\n")
"""
    environment = {**os.environ, "PYTHONPATH": str(target)}
    out = run(sys.executable, "-c", code, cwd=away, env=environment)
    recipes, checked, modules = out.split("----\n")
    assert {line.split()[0] for line in recipes.splitlines()} == RECIPES
    assert checked.startswith("OK: digits, 8 steps")
    assert len(modules.splitlines()) > 20
    assert [path for path in modules.splitlines() if not Path(path).is_relative_to(target)] == []
    command = (target / "bin" / "prunekit", "--version")
    assert prunekit.__version__ in run(*command, cwd=away, env=environment)


@pytest.mark.thorough
def test_the_digits_recipe_runs_in_a_clean_environment(built, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    programs = tmp_path / "env" / "bin"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KERAS_", "VIRTUAL"))}
    run(programs / "python", "-m", "pip", "install", "--quiet", f"{built[0]}[examples]", env=clean)
    away = tmp_path / "away"
    away.mkdir()
    where = run(programs / "python", "-c", "import prunekit; print(prunekit.__file__)", cwd=away, env=clean)
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
    run(programs / "prunekit", "compress", "digits", "-o", "run", cwd=away, env=clean)
    report = json.loads((away / "run" / "report.json").read_text())
    assert report["expectations"] and all(row["met"] for row in report["expectations"])
    assert {"model.keras", "report.html", "exports"} <= {path.name for path in (away / "run").iterdir()}
    assert list(away.iterdir()) == [away / "run"]


def package_sources():
    return {path: path.read_text() for path in (ROOT / "prunekit").rglob("*.py")}


def documents():
    """The text of each page and notebook for users."""
    docs = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb")]
    return [path.read_text() for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs)]


def extras_named(texts):
    """The extras in `prunekit[a,b]` and `.[a,b]`."""
    found = [inner for text in texts for inner in re.findall(r"(?:prunekit|'\.)\[([a-z,]+)\]", text)]
    return {name for names in found for name in names.split(",")}


def distribution(requirement):
    """The name of the distribution in a requirement such as "tf_keras>=2.20", as indexes write it."""
    return re.match(r"[\w.-]+", requirement)[0].replace("_", "-").lower()


def distributions(requirements):
    return {distribution(text) for text in requirements}


def imported_packages():
    """Names of the packages of others that any line of prunekit imports."""
    found = set(BY_NAME)
    for text in package_sources().values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module)
    return {name.partition(".")[0] for name in found} - {"prunekit", *sys.stdlib_module_names}


def test_each_extra_that_a_message_names_installs_what_the_message_asks_for():
    assert extras_named(package_sources().values()) == set(INSTALLS)
    assert [extra for extra, package in INSTALLS.items() if package not in distributions(EXTRAS[extra])] == []


def test_every_extra_is_named_where_users_look_and_no_other():
    named = extras_named([*package_sources().values(), *documents()])
    assert set(EXTRAS) - TOOLS <= named <= set(EXTRAS)


def test_extras_of_extras_exist():
    assert extras_named(part for parts in EXTRAS.values() for part in parts) <= set(EXTRAS)
    assert set(EXTRAS) - {"dev", "jax", "torch"} == extras_named(EXTRAS["dev"])


def test_what_the_package_imports_is_declared_and_what_is_declared_is_imported():
    owners = packages_distributions()
    # Where a package of another name brings the module (tensorflow-cpu), one of the owners is declared.
    used = {name: distributions(owners.get(name, [name])) for name in imported_packages()}
    declared = distributions(PROJECT["dependencies"])
    declared |= {name for extra in set(EXTRAS) - TOOLS for name in distributions(EXTRAS[extra])}
    # pydantic_core comes with pydantic, which pins its version.
    assert {name for name, found in used.items() if not found & declared} == {"pydantic_core"}
    # Notebooks are shown by ipython.
    assert declared - set().union(*used.values()) == {"ipython"}


def test_the_python_versions_agree():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    versions = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in PROJECT["classifiers"]]
    named = [tuple(map(int, found[1].split("."))) for found in versions if found]
    assert min(named) == tuple(map(int, oldest.split("."))) <= sys.version_info
    assert f'target-version = "py{oldest.replace(".", "")}"' in (ROOT / "pyproject.toml").read_text()
    assert f"sys.version_info < ({oldest.replace('.', ', ')})" in (ROOT / "scripts" / "environment").read_text()
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {oldest} or newer" in (ROOT / page).read_text()


def test_the_package_says_that_it_is_typed():
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "prunekit" / "py.typed").is_file()


def test_the_citation_is_of_this_version_and_valid():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0"
    assert {"cff-version", "message", "title", "authors"} <= set(found) <= CITATION_KEYS
    assert found["version"] == prunekit.__version__
    assert found["license"] == PROJECT["license"]
    assert [author["name"] for author in found["authors"]] == [author["name"] for author in PROJECT["authors"]]
