"""The folders are the data's way through the program: a module imports only from what stands above it.

The order inside a folder is that of the list in its docstring, which is its map for readers, too.
"""

import ast
import re
from pathlib import Path

import pytest

import prunekit

PACKAGE = Path(prunekit.__file__).parent

# The order of the package's own files and folders: what all may import stands first.
TOP = (
    "version missing_packages lazy_names suggestions keyword_options registry sparsity anatomy core initialization "
    "techniques training_tools delivery searching operations interop recipe doctor options terminal commands cli "
    "__main__ schedules criteria allocations patterns policies penalties ranges reports errors"
).split()
ENTRY = re.compile(r"^- `(\w+)`: \S", re.MULTILINE)


def listed(folder):
    """The files and folders in the docstring of a folder, in order."""
    return ENTRY.findall(ast.get_docstring(parsed(f"{folder}/__init__")) or "")


def parsed(name):
    return ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))


def ordered(entries, folder=""):
    """The modules of a folder and of the folders inside it, in order."""
    for entry in entries:
        name = f"{folder}/{entry}".strip("/")
        if (PACKAGE / name / "__init__.py").is_file():
            yield from ordered(listed(name), name)
        else:
            yield name


NAMES = list(ordered(TOP))
RANKS = {name: rank for rank, name in enumerate(NAMES)}
# Their `__init__` holds public names, loaded on first use: `pk.Pruner`, `pk.gradients.hvp`, `pk.loops.TapeLoop`. It is
# for users: no module of prunekit imports from it. All other folders have a docstring alone.
FACADES = {
    "": "errors",
    "training_tools/gradients": "diagnosis",
    "training_tools/loops": "tape_loop",
    "interop/tfmot": "conversion",
}
FILES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def imports_of(nodes):
    """What of prunekit is imported: modules as in `NAMES`, and folders whose own names are."""
    for node in nodes:
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (_module(name.split(".")[1:]) for name in found if name.split(".")[0] == "prunekit")


def _module(parts):
    """The module, or the folder, in which the name is: the longest part of it that is one."""
    while parts and "/".join(parts) not in RANKS and not (PACKAGE / Path(*parts)).is_dir():
        parts = parts[:-1]
    return "/".join(parts)


def test_every_file_has_a_place():
    modules = [name for name in FILES if not name.endswith("__init__")]
    assert sorted(modules) == sorted(NAMES), "list each module in the docstring of its folder's __init__.py"


def test_no_folder_is_a_heap():
    heaps = {path.parent for path in PACKAGE.rglob("*.py") if len(list(path.parent.glob("*.py"))) > 21}
    assert not heaps, "about 20 files fit into one folder"


def test_every_module_imports_only_from_above():
    for name in NAMES:
        for target in imports_of(ast.walk(parsed(name))):
            assert target in RANKS, f"{name} imports the folder '{target}': import from the module with the name"
            assert RANKS[target] < RANKS[name], f"{name} imports {target}, which comes after it"


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("__init__")])
def test_a_folder_re_exports_nothing_but_lazily(name):
    folder, tree = name.removesuffix("__init__").strip("/"), parsed(name)
    if folder not in FACADES:
        assert not list(imports_of(ast.walk(tree))), "folders re-export nothing"
        return
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    outside = [node for node in tree.body if node is not block]
    assert set(imports_of(outside)) <= {"lazy_names", "version"}, "public names are loaded on first use"
    last = RANKS[f"{folder}/{FACADES[folder]}".strip("/")]
    for target in imports_of(block.body):
        assert target in FACADES or RANKS[target] <= last
        assert target.startswith(folder), f"{name} offers {target}, which is another folder's"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import prunekit", [""]),
        ("import prunekit as pk", [""]),
        ("from prunekit import Pruner", [""]),
        ("from prunekit import doctor, cli", ["doctor", "cli"]),
        ("from prunekit.training_tools import gradients", ["training_tools/gradients"]),
        ("from prunekit.training_tools.gradients import hvp", ["training_tools/gradients"]),
        (
            "def f():\n    from prunekit.core.runtime import backend, compilation",
            ["core/runtime/backend", "core/runtime/compilation"],
        ),
        ("import prunekit.techniques.pruning.training.pruner", ["techniques/pruning/training/pruner"]),
        ("from prunekit.techniques.pruning.training.pruner import Pruner", ["techniques/pruning/training/pruner"]),
        ("from prunekit.version import __version__", ["version"]),
        ("import prunekitchen, keras\nfrom keras import ops", []),
    ],
)
def test_every_kind_of_import_is_seen(text, found):
    assert list(imports_of(ast.walk(ast.parse(text)))) == found
