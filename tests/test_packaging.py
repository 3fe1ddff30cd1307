"""Wheel and sdist: what they hold, and that the wheel works without the repository."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import prunekit

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRA = re.compile(r"prunekit\[([a-z]+)\]")


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
    """Paths of the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    return build(ROOT, folder, "wheel"), build(ROOT, folder, "sdist")


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_package_its_recipes_and_the_licence_and_nothing_else(built):
    names = set(contents(built[0]))
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "prunekit").rglob("*.py")}
    recipes = {f"prunekit/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    data = {"prunekit/py.typed", "prunekit/delivery/page.css"}
    assert len(recipes) >= 5
    about = {name for name in names if ".dist-info/" in name}
    assert names - about == modules | recipes | data
    assert any(name.endswith("licenses/LICENSE") for name in about)


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        assert not [name for name in archive.getnames() if "__pycache__" in name or "/.venv/" in name]
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    (tmp_path / "dist").mkdir()
    assert contents(build(source, tmp_path / "dist", "wheel")) == contents(built[0])


def test_the_installed_wheel_runs_without_the_repository(built, tmp_path):
    target = tmp_path / "installed"
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "install", *options, "--target", target, built[0])
    environment = {**os.environ, "PYTHONPATH": str(target)}
    code = "import prunekit.cli as cli; print(cli.__file__); cli.main(['recipes'])"
    lines = run(sys.executable, "-c", code, cwd=tmp_path, env=environment).splitlines()
    assert Path(lines[0]).is_relative_to(target)
    assert {line.split()[0] for line in lines[1:]} == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    checked = run(sys.executable, "-m", "prunekit", "check", "digits", cwd=tmp_path, env=environment)
    assert checked.startswith("OK: digits, 5 steps")


@pytest.mark.thorough
@pytest.mark.slow
def test_the_digits_recipe_runs_in_a_clean_environment(built, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"{built[0]}[examples]")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    away = tmp_path / "away"
    away.mkdir()
    out = run(tmp_path / "env" / "bin" / "prunekit", "compress", "digits", "-o", "run", cwd=away, env=clean)
    assert "Written to run" in out and (away / "run" / "model.keras").is_file()


def test_every_extra_that_a_message_names_exists():
    texts = [path.read_text() for path in (ROOT / "prunekit").rglob("*.py")]
    named = {extra for text in texts for extra in EXTRA.findall(text)}
    extras = set(PROJECT["optional-dependencies"])
    assert {"examples", "hub", "legacy", "notebook", "ray"} <= named <= extras


def test_extras_of_extras_exist():
    extras = PROJECT["optional-dependencies"]
    inner = {name for parts in extras.values() for part in parts for name in re.findall(r"prunekit\[(.*)\]", part)}
    assert {name for names in inner for name in names.split(",")} <= set(extras)


def test_the_classifiers_say_what_runs_here():
    versions = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if line.startswith("Programming Language")}
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in versions
    assert PROJECT["requires-python"] == ">=3.11" and "3.11" in versions
    assert ("Typing :: Typed" in PROJECT["classifiers"]) == (ROOT / "prunekit" / "py.typed").is_file()


def test_the_citation_names_this_version():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["version"] == prunekit.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(found)
    assert found["license"] == PROJECT["license"]
