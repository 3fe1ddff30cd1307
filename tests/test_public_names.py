"""The public names: all there, loaded on first use, the same for type checkers."""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import prunekit
from prunekit import version

ROOT = Path(prunekit.__file__).parent.parent
HEAVY = ("tensorflow", "keras", "numpy", "jax", "torch", "tf_keras", "matplotlib", "sklearn")
LIGHTER = (*HEAVY, "pydantic", "yaml", "click", "importlib.metadata")


def python(code, path=ROOT):
    """What a fresh interpreter prints for `code`, with `path` to import prunekit from."""
    command = [sys.executable, "-c", code]
    # The folder it runs in comes first on sys.path, so that must not be another place with a prunekit in it.
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_prunekit_imports_nothing_heavy():
    found = python(
        "import sys, os; before = dict(os.environ); import prunekit; dir(prunekit); assert os.environ == before\n"
        f"print([name for name in {LIGHTER} if name in sys.modules])"
    )
    assert found.strip() == "[]"


def test_schedules_recipes_and_the_version_need_no_keras():
    found = python(
        "import sys, prunekit as pk; pk.schedules.PolynomialDecay(); pk.Recipe; pk.load_recipe('digits')\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert found.strip() == "[]"


@pytest.mark.parametrize("name", prunekit.__all__)
def test_every_public_name_is_there(name):
    value = getattr(prunekit, name)
    assert value is getattr(prunekit, name)
    if name != "__version__":
        assert (value.__name__ if inspect.ismodule(value) else value.__module__).startswith("prunekit.")
        assert value.__doc__


def test_the_list_the_table_and_the_type_checkers_block_agree():
    tree = ast.parse(Path(prunekit.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == prunekit._HOME
    assert sorted([*imported, "__version__"]) == sorted(prunekit.__all__)
    assert len(prunekit.__all__) <= 55, (
        "operations and callbacks alone are flat; a class belongs to a group, such as `pk.criteria`"
    )
    assert set(prunekit.__all__) <= set(dir(prunekit))


@pytest.mark.parametrize("package", [prunekit.gradients, prunekit.loops], ids=["gradients", "loops"])
def test_a_public_package_has_its_names_whatever_was_imported_of_it(package):
    for file in Path(package.__file__).parent.glob("*.py"):
        if file.stem != "__init__":
            # A module of the name of a function would take its place in the package.
            importlib.import_module(f"{package.__name__}.{file.stem}")
    for name in package.__all__:
        value = getattr(package, name)
        assert not inspect.ismodule(value) and value.__module__ == package._HOME[name] and value.__doc__
    assert set(package.__all__) == set(package._HOME) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'jacobean'"):
        package.jacobean  # noqa: B018


def test_every_report_has_a_verdict_of_its_own():
    from prunekit.anatomy.records.display import Displayed

    kinds = [kind for name in prunekit.reports.__all__ if isinstance(kind := getattr(prunekit.reports, name), type)]
    assert len(kinds) >= 15
    for kind in kinds:
        assert issubclass(kind, Displayed) and kind.verdict is not Displayed.verdict, kind


def test_a_star_import_gives_the_public_names():
    namespace = {}
    exec("from prunekit import *", namespace)
    assert set(prunekit.__all__) <= set(namespace)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'prunekit' has no attribute 'Prunner'"):
        prunekit.Prunner  # noqa: B018
    assert not hasattr(prunekit, "__wrapped__")


def test_the_version_is_that_of_the_project():
    import tomllib

    assert prunekit.__version__ == version.__version__
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["dynamic"] == ["version"]
    assert ROOT / settings["tool"]["hatch"]["version"]["path"] == Path(version.__file__)


def test_a_wheel_holds_the_recipes_and_finds_them(tmp_path):
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is in the extra `dev`")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.startswith(f"prunekit-{prunekit.__version__}-")
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert (installed / "prunekit" / "py.typed").exists()
    code = "from prunekit.cli import run; raise SystemExit(run(['recipes', '--json']))"
    rows = json.loads(python(code, installed))
    assert [Path(row["path"]).parent for row in rows] == [installed / "prunekit" / "recipes"] * len(rows)
    assert [row["name"] for row in rows] == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
