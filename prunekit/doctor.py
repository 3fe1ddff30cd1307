"""Implements `prunekit doctor`: checks which features run on this machine, with a remedy for each missing feature."""

import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prunekit.anatomy.records.tables import aligned
from prunekit.core.runtime import environment
from prunekit.core.runtime.environment import Device, Environment
from prunekit.delivery.reports.formatting import clean, shorten, size
from prunekit.recipe.datasets.builtin_files import GET_DIGITS, GET_FASHION, fashion_files
from prunekit.recipe.text.loader import RecipeError, builtin_recipes

if TYPE_CHECKING:
    from rich.console import Console

# Version of the JSON output; increases when a key changes its meaning or is removed.
DOCTOR_VERSION = 1
_LONGEST_REASON = 160
_KERAS = "Keras 3"
_SWITCH = "run with KERAS_BACKEND=tensorflow"
_TRAINING = ("tensorflow", "jax", "torch")


@dataclass(frozen=True)
class Check:
    """Check of one prunekit feature in this environment.

    Attributes:
        name: Name of the feature, such as "pruning in fit".
        detail: Place where the feature runs, or the missing requirement.
        remedy: Remedy in one line; None if nothing is missing.
        essential: True if pruning and training require the feature.
    """

    name: str
    detail: str
    remedy: str | None = None
    essential: bool = False

    @property
    def status(self) -> str:
        """Status of the feature: "ok" or "missing"."""
        return "ok" if self.remedy is None else "missing"

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-compatible values."""
        return {"name": self.name, "status": self.status, **asdict(self)}


@dataclass(frozen=True)
class Examination:
    """The environment and the checks of all features in it."""

    environment: Environment
    checks: tuple[Check, ...]

    @property
    def missing(self) -> tuple[Check, ...]:
        """Checks of the features that will not run."""
        return tuple(check for check in self.checks if check.status != "ok")

    @property
    def ok(self) -> bool:
        """True if models can be pruned and trained here."""
        return not any(check.essential for check in self.missing)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-compatible values."""
        return {
            "doctor_version": DOCTOR_VERSION,
            "ok": self.ok,
            "environment": self.environment.to_dict(),
            "checks": [check.to_dict() for check in self.checks],
        }


def examine() -> Examination:
    """Checks all features here: imports each feature's packages, and compiles a small function."""
    here = environment.describe()
    return Examination(here, tuple(check(here) for check in _CHECKS))


# ---- the checks ------------------------------------------------------------------------------------------------------


def _keras(here: Environment) -> Check:
    if here.problem is not None:
        asked = os.environ.get("KERAS_BACKEND")
        told = here.problem if asked is None else f"with KERAS_BACKEND={asked}: {here.problem}"
        return Check(_KERAS, _reason(told), _start_keras(here, asked), essential=True)
    return Check(_KERAS, f"{here.versions['keras']} on {_backend(here)}", essential=True)


def _fit(here: Environment) -> Check:
    return _training("pruning in fit", here)


def _tape_loops(here: Environment) -> Check:
    if (here.replicas or 1) > 1:
        detail = f"a tape loop supports one replica, and {here.strategy} has {here.replicas}"
        return Check("pruning in tape loops", detail, "use model.fit with PruningCallback")
    return _training("pruning in tape loops", here)


def _training(name: str, here: Environment) -> Check:
    if here.problem is not None:
        return _without_keras(name, essential=True)
    if here.backend not in _TRAINING:
        detail = f"Keras runs on {here.backend}; prunekit does not prune during training on this backend"
        return Check(name, detail, _use_tensorflow(here), essential=True)
    return Check(name, _place(here), essential=True)


def _one_shot(here: Environment) -> Check:
    if here.problem is not None:
        return _without_keras("one-shot pruning", essential=True)
    return Check("one-shot pruning", _place(here), essential=True)


def _xla(here: Environment) -> Check:
    if here.problem is not None:
        return _without_keras("XLA")
    if here.xla is None:
        return Check("XLA", f"not used by Keras on {here.backend}")
    if not here.xla:
        # By default, Keras compiles with XLA whenever all layers support it.
        return Check("XLA", _reason(str(here.xla_problem)), "compile models with jit_compile=False")
    return Check("XLA", f"compiles for {here.main_device}")


def _litert(here: Environment) -> Check:
    name, runtime = "LiteRT export", "ai-edge-litert"
    if here.problem is not None:
        return _without_keras(name)
    if here.backend != "tensorflow":
        return Check(name, "the conversion needs Keras on tensorflow", _use_tensorflow(here))
    problem = _import_problem("ai_edge_litert.interpreter")
    if problem is not None:
        return Check(name, f"{runtime}, which checks each exported file: {problem}", _install(runtime))
    return Check(name, f"{_backend(here)} converts, {runtime} {here.versions[runtime]} runs the files")


def _pictures(_: Environment) -> Check:
    return _package("pictures in reports", "matplotlib", "matplotlib.figure", _install("matplotlib"))


def _recipes(here: Environment) -> Check:
    if here.problem is not None:
        return _without_keras("recipes")
    # Importing the runner imports all modules that a run needs.
    problem = _import_problem("prunekit.recipe.run.runner")
    found = builtin_recipes()
    if problem is not None or not found:
        return Check(
            "recipes", problem or "no built-in recipe found", "pip install --upgrade --force-reinstall prunekit"
        )
    return Check("recipes", f"{len(found)} built in: {', '.join(found)}")


def _digits(_: Environment) -> Check:
    return _package("data: digits", "scikit-learn", "sklearn.datasets", GET_DIGITS)


def _fashion(_: Environment) -> Check:
    try:
        folder = fashion_files()["train_inputs"].parent
    except RecipeError:
        return Check("data: fashion-mnist", "the files are not on this machine", GET_FASHION)
    return Check("data: fashion-mnist", str(folder))


_CHECKS: tuple[Callable[[Environment], Check], ...] = (
    _keras,
    _fit,
    _tape_loops,
    _one_shot,
    _xla,
    _litert,
    _pictures,
    _recipes,
    _digits,
    _fashion,
)


# ---- shared by the checks --------------------------------------------------------------------------------------------


def _without_keras(name: str, *, essential: bool = False) -> Check:
    return Check(name, "Keras does not start", f"as for {_KERAS}", essential)


def _place(here: Environment) -> str:
    device = f" on {here.main_device}" if here.main_device is not None else ""
    spread = f", {_distribution(here)}" if here.strategy is not None else ""
    return f"{here.backend}{device}{spread}"


def _distribution(here: Environment) -> str:
    return f"{here.strategy} with {here.replicas} replica{'' if here.replicas == 1 else 's'}"


def _backend(here: Environment) -> str:
    version = here.versions.get(str(here.backend))
    return f"{here.backend} {version}" if version is not None else str(here.backend)


def _package(name: str, package: str, module: str, remedy: str) -> Check:
    problem = _import_problem(module)
    if problem is not None:
        return Check(name, f"{package}: {problem}", remedy)
    return Check(name, f"{package} {environment.version_of(package) or 'of unknown version'}")


def _import_problem(module: str) -> str | None:
    """Returns the reason why a module cannot be imported, or None if the import succeeds."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        # "not installed" only if the package itself is absent, not one of its submodules or dependencies.
        return "not installed" if error.name in (module, module.partition(".")[0]) else _reason(str(error))
    except Exception as error:  # noqa: BLE001 (a broken library can raise any exception)
        return _reason(str(error) or type(error).__name__)
    return None


def _reason(text: str) -> str:
    return shorten(clean(" ".join(text.split())), _LONGEST_REASON)


def _start_keras(here: Environment, asked: str | None) -> str:
    keras = here.versions["keras"]
    if keras is None or int(keras.split(".")[0]) < 3:
        return _install("keras")
    if here.versions["tensorflow"] is None:
        return _install("tensorflow")
    if asked not in (None, "tensorflow"):
        return _SWITCH
    again = f"pip install --force-reinstall '{_requirement('keras')}' '{_requirement('tensorflow')}'"
    # Without KERAS_BACKEND, the backend may come from ~/.keras/keras.json.
    return again if asked is not None else f"{_SWITCH}; if Keras still does not start, {again}"


def _use_tensorflow(here: Environment) -> str:
    return _SWITCH if here.versions["tensorflow"] is not None else f"{_install('tensorflow')}, and {_SWITCH}"


def _install(package: str) -> str:
    return f"pip install '{_requirement(package)}'"


def _requirement(package: str) -> str:
    """Returns prunekit's declared requirement, such as "keras>=3.13"; only the package's name if none is declared."""
    try:
        declared = importlib.metadata.requires("prunekit") or []
    except importlib.metadata.PackageNotFoundError:
        # prunekit is a source checkout on sys.path, not installed.
        declared = []
    return next((text for text in declared if re.match(r"[\w.-]+", text + " ")[0] == package), package)  # type: ignore[index]


# ---- text output -----------------------------------------------------------------------------------------------------


def show_examination(found: Examination, console: "Console") -> None:
    """Prints the environment, the checks and the verdict; in a pipe, one line per item."""
    from rich.text import Text

    _show_rows(console, list(_facts(found.environment)))
    console.print()
    rows = [(check.status, check.name, _told(check)) for check in found.checks]
    _show_rows(console, rows, [_style(check) for check in found.checks])
    console.print()
    console.print(Text(_verdict(found), style="bold" if found.ok else "bold red"), soft_wrap=not console.is_terminal)


def _style(check: Check) -> str:
    if check.status == "ok":
        return "green"
    return "bold red" if check.essential else "yellow"


def _show_rows(console: "Console", rows: Sequence[tuple[str, ...]], styles: Sequence[str] = ()) -> None:
    """Prints rows in columns; on a terminal the last column folds long texts, the other columns do not wrap."""
    from rich.table import Table
    from rich.text import Text

    if not console.is_terminal:
        for line in aligned(rows, range(len(rows[0]))):
            console.print(Text(line), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in rows[0][:-1]:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row, style in zip(rows, styles or ["bold"] * len(rows), strict=True):
        table.add_row(Text(row[0], style=style), *map(Text, row[1:]))
    console.print(table)


def _facts(here: Environment) -> Iterator[tuple[str, str]]:
    present = {name: version for name, version in here.versions.items() if version is not None}
    yield "prunekit", f"{present.pop('prunekit')} on Python {present.pop('python')}"
    for device in here.devices:
        yield "device", _device(device)
    yield "processor", f"{here.cores} cores" if here.cores else "number of cores unknown"
    if here.memory is not None:
        available = f", {size(here.memory_available)} available" if here.memory_available is not None else ""
        yield "memory", f"{size(here.memory)}{available}"
    if here.backend is not None:
        yield "precision", f"{here.floatx}, layers {here.dtype_policy}"
        yield "distribution", _distribution(here) if here.strategy else "none"
    yield "packages", ", ".join(f"{name} {version}" for name, version in present.items()) or "none"
    absent = [name for name, version in here.versions.items() if version is None]
    if absent:
        yield "not installed", ", ".join(absent)


def _device(device: Device) -> str:
    parts = [device.name]
    if device.model is not None:
        parts.append(clean(device.model))
    if device.memory is not None:
        parts.append(size(device.memory))
    if device.compute_capability is not None:
        parts.append(f"compute capability {device.compute_capability}")
    return ", ".join(parts)


def _told(check: Check) -> str:
    return clean(check.detail if check.remedy is None else f"{check.detail}. Remedy: {check.remedy}")


def _verdict(found: Examination) -> str:
    names = ", ".join(check.name for check in found.missing)
    if not found.ok:
        return f"Models cannot be pruned and trained here. Missing: {names}."
    return "Models can be pruned and trained here." + (f" Missing for the rest: {names}." if names else "")
