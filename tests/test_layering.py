"""The folders are the data's way through the program: a module imports only from folders above its own."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "prunekit"

# In order; inside a folder a module imports only from files before it. A new module is a new name here.
ORDER = {
    "sparsity": ("arguments schedules adoption selection sums scores patterns detection tfmot allocation").split(),
    "anatomy": (
        "tables reports counting layers targets fans watching flow tracing cost inspection archives model_files"
    ).split(),
    "training": (
        "core environment functional trainer distribution observation signals drawing lsuv initializers "
        "losses masking choice changes rules tfmot_rules pruner snapshot pruner_state randomness backup "
        "callbacks accumulation capture gradient_statistics interception gradient_estimates measured "
        "contributions layer_rules example_pass per_example products recomputation parts derivatives "
        "diagnosis gradients least_squares activation_store cutting prefix loops"
    ).split(),
    "delivery": (
        "wording rows probe xnnpack litert advice checking subject export record plots signal_plot markup page report "
        "sweeps sweep_plot"
    ).split(),
    "interop": ["legacy", "layers", "config", "files", "wrappers", "graph", "training_state", "comparison", "tfmot"],
    "recipe": (
        "fields sources timing schema text presence loader factories idx npy data models summary progress copies "
        "interruption replicas preparation plan directory recorded checkpoint expectations execution outcome runner "
        "grid point workers sweep"
    ).split(),
}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.parts[-2] in ORDER)


def rank(folder, module):
    return (list(ORDER).index(folder), ORDER[folder].index(module) if module in ORDER[folder] else -1)


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("prunekit."):
            parts = node.module.split(".")[1:]
            yield from ([parts] if len(parts) > 1 else [[*parts, alias.name] for alias in node.names])
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1:] for alias in node.names if alias.name.startswith("prunekit."))


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_imports_only_from_above(path):
    folder, module = path.parts[-2], path.stem
    if module == "__init__":
        assert not list(imports_of(PACKAGE / path)), "folders re-export nothing"
        return
    assert module in ORDER[folder], f"place {path} in ORDER"
    for target in imports_of(PACKAGE / path):
        assert rank(*target[:2]) < rank(folder, module), f"{path} imports {'.'.join(target)}, which comes after it"
