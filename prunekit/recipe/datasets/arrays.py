"""Reads data that are arrays: npz, npy and idx files, factories, and pairs given in Python."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prunekit.recipe.datasets.idx import read_idx
from prunekit.recipe.datasets.npy import npz_names, read_npy, read_npz
from prunekit.recipe.datasets.parts import ArrayPart, Arrays, Opened, mapped
from prunekit.recipe.settings.data_source import ArrayFiles, DataSource, NpzNames
from prunekit.recipe.text.factories import call_factory
from prunekit.recipe.text.loader import RecipeError

PARTS = tuple(ArrayFiles.model_fields)
_USUAL = {
    "train": ("x_train", "y_train"),
    "validation": ("x_val", "y_val"),
    "test": ("x_test", "y_test"),
}
# Names that are tried in this order, if a recipe gives none.
_TRIED = {
    "train": (
        ("x", "y"),
        ("x_train", "y_train"),
        ("X", "y"),
        ("X_train", "y_train"),
        ("train_x", "train_y"),
        ("inputs", "labels"),
        ("inputs", "targets"),
        ("train_inputs", "train_labels"),
        ("train_inputs", "train_targets"),
        ("train_images", "train_labels"),
        ("images", "labels"),
        ("data", "target"),
    ),
    "validation": (
        ("x_val", "y_val"),
        ("x_valid", "y_valid"),
        ("x_validation", "y_validation"),
        ("X_val", "y_val"),
        ("val_x", "val_y"),
        ("val_inputs", "val_labels"),
        ("validation_inputs", "validation_labels"),
        ("validation_inputs", "validation_targets"),
        ("val_images", "val_labels"),
    ),
    "test": (
        ("x_test", "y_test"),
        ("X_test", "y_test"),
        ("test_x", "test_y"),
        ("test_inputs", "test_labels"),
        ("test_inputs", "test_targets"),
        ("test_images", "test_labels"),
    ),
}


def open_arrays(source: DataSource) -> Opened:
    """Returns the arrays of idx or npy files, of an npz file, or of a factory.

    Raises:
        RecipeError: A file is missing or damaged, or arrays do not fit together.
    """
    if source.idx is not None:
        return opened("idx files", with_channel(_read_files(_paths(source.idx), read_idx)))
    if source.npy is not None:
        return opened("npy files", _read_files(_paths(source.npy), read_npy))
    if source.npz is not None:
        return _open_npz(existing(source.npz), source.arrays)
    factory = str(source.factory)
    pairs = call_factory(factory, source.arguments, "data")
    return opened(factory, from_pairs(pairs, f"the factory {factory!r}"))


def opened(name: str, arrays: Mapping[str, Arrays], notes: tuple[str, ...] = ()) -> Opened:
    """Returns the checked parts of arrays that are named "train_inputs", "train_labels" and so on.

    Raises:
        RecipeError: Arrays are not finite numbers, or do not fit together.
    """
    parts = {part.partition("_")[0]: None for part in arrays}
    for part in parts:
        _check_part(name, part, arrays[f"{part}_inputs"], arrays[f"{part}_labels"])
    for part in [part for part in parts if part != "train"]:
        train, other = arrays["train_inputs"], arrays[f"{part}_inputs"]
        _check_same(name, part, train, other)
    found = {part: ArrayPart(arrays[f"{part}_inputs"], arrays[f"{part}_labels"]) for part in parts}
    return Opened(name, found["train"], found.get("validation"), found.get("test"), notes=notes)


def existing(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a data file.

    Raises:
        RecipeError: There is no such file.
    """
    if not os.path.isfile(path):
        raise RecipeError(f"the data file {os.fspath(path)} does not exist.")
    return Path(path)


def with_channel(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds the channel axis that convolutions expect to images of shape (examples, rows, columns)."""
    for part in ("train_inputs", "test_inputs"):
        if arrays[part].ndim == 3:
            arrays[part] = arrays[part][..., np.newaxis]
    return arrays


def from_pairs(pairs: Any, owner: str) -> dict[str, Arrays]:
    """Returns the arrays of ((train inputs, labels), (test inputs, labels)); several are mappings from names.

    Args:
        pairs: The pairs.
        owner: Text for errors, such as "`data`".

    Raises:
        RecipeError: `pairs` has a different structure.
    """
    try:
        (train_inputs, train_labels), (test_inputs, test_labels) = pairs
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{owner} must be ((train inputs, train labels), (test inputs, test labels)). Received: {_outline(pairs)}."
        ) from error
    found: dict[str, Arrays] = {}
    for part, value in zip(PARTS, (train_inputs, train_labels, test_inputs, test_labels), strict=True):
        if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
            if not any(isinstance(item, Mapping | tuple | list) for item in value.values()):
                found[part] = {key: np.asarray(item) for key, item in value.items()}
                continue
        if isinstance(value, dict | tuple | list):
            raise RecipeError(
                f"{part} of {owner} must be one array, or a mapping from names of the model's inputs or outputs to "
                f"arrays. Received: {_outline(value)}."
            )
        found[part] = np.asarray(value)
    return found


# ---- files -----------------------------------------------------------------------------------------------------------


def _paths(files: Any) -> dict[str, Path]:
    return {part: existing(getattr(files, part)) for part in PARTS}


def _read_files(paths: dict[str, Path], read: Callable[[Path], np.ndarray]) -> dict[str, np.ndarray]:
    return {part: read(path) for part, path in paths.items()}


def _open_npz(path: Path, names: NpzNames) -> Opened:
    held = npz_names(path)
    chosen = _chosen_names(path, names, held)
    wanted = {
        f"{part}.{key}" if isinstance(name, Mapping) else part: array
        for part, name in chosen.items()
        for key, array in (name.items() if isinstance(name, Mapping) else [("", name)])
    }
    read = read_npz(path, wanted)
    arrays = {
        part: {key: read[f"{part}.{key}"] for key in name} if isinstance(name, Mapping) else read[part]
        for part, name in chosen.items()
    }
    used = list(dict.fromkeys(wanted.values()))
    unused = [name for name in held if name not in used]
    notes = []
    if unused or set(used) != {"x_train", "y_train", "x_test", "y_test"}:
        left = f"; not used: {_listed(unused)}" if unused else ""
        notes.append(f"data: read {_listed(used)} of {path.name}{left}.")
    return opened(path.name, arrays, tuple(notes))


def has_labels(path: Path) -> bool:
    """Returns True if an .npz file has training inputs and labels under one of the usual pairs of names."""
    return _pair("train", NpzNames(), npz_names(path), _TRIED["train"]) is not None


def has_all_inputs(path: Path, names: Sequence[str]) -> bool:
    """Returns True if a model has several inputs and an .npz file has all of them under their names."""
    return len(names) > 1 and set(names) <= set(npz_names(path))


def arrays_by_name(path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, Any]:
    """Returns the names of arrays for `data.arrays`, if an .npz file has several inputs under their names, and labels.

    Args:
        path: The file.
        inputs: Names of the model's inputs.
        outputs: Names of its outputs, under which the file may have several labels.
    """
    if not has_all_inputs(path, inputs):
        return {}
    held = [name for name in npz_names(path) if name not in inputs]
    several = {name: name for name in outputs} if len(outputs) > 1 and set(outputs) <= set(held) else None
    usual = dict.fromkeys(label for _, label in _TRIED["train"])
    labels = several or next((name for name in usual if name in held), None)
    return {} if labels is None else {"train_inputs": {name: name for name in inputs}, "train_labels": labels}


def open_inputs(path: Path, names: Sequence[str]) -> Opened:
    """Opens the training inputs of an .npz file without labels; the part's labels are zeros.

    Args:
        path: The file.
        names: Names of the model's inputs, under which the file may hold them.

    Raises:
        RecipeError: The file has no inputs under a usual name, nor all inputs of the model under theirs.
    """
    held, usual = npz_names(path), list(dict.fromkeys(name for name, _ in _TRIED["train"]))
    name = None if has_all_inputs(path, names) else next((name for name in usual if name in held), None)
    if name is None and not (names and set(names) <= set(held)):
        remedy = f", or under the names of the model's inputs: {_listed(names)}" if names else ""
        raise RecipeError(
            f"{path} has no training inputs under a usual name; it has {_listed(held)}. Tried: {', '.join(usual)}. "
            f"Save them as x, with their labels as y: numpy.savez(path, x=..., y=...){remedy}."
        )
    inputs = read_npz(path, {one: one for one in names}) if name is None else read_npz(path, {"x": name})["x"]
    examples = len(inputs[names[0]] if name is None else inputs)
    return opened(path.name, {"train_inputs": inputs, "train_labels": np.zeros(examples, "int64")})


def _chosen_names(path: Path, names: NpzNames, held: list[str]) -> dict[str, Any]:
    """Returns {part: name, or names of several arrays} of the arrays to read; parts that the file lacks are left out.

    Raises:
        RecipeError: The file has no training examples under a usual name.
    """
    chosen = {part: _pair(part, names, held, _TRIED[part]) for part in ("validation", "test")}
    tried = _TRIED["train"]
    if any(chosen.values()):
        # Beside other parts, "x" may hold the examples of all parts.
        tried = tuple(sorted(tried, key=lambda pair: "train" not in pair[0]))
    train = _pair("train", names, held, tried)
    if train is None:
        raise RecipeError(
            f"{path} has no arrays of training examples under usual names such as x and y; it has {_listed(held)}. "
            "Name them: data: {npz: ..., arrays: {train_inputs: ARRAY, train_labels: ARRAY}}; several inputs are a "
            "mapping, {INPUT: ARRAY, ...}. On the command line, save them as x and y; several inputs under their "
            "names in the model, beside y."
        )
    found = {"train": train, **chosen}
    return {
        f"{part}_{kind}": name
        for part, pair in found.items()
        if pair is not None
        for kind, name in zip(("inputs", "labels"), pair, strict=True)
    }


def _pair(part: str, names: NpzNames, held: list[str], tried: tuple[tuple[str, str], ...]) -> Any:
    """Returns the names of inputs and labels that the recipe gives, else the first usual ones in the file, or None."""
    given = [getattr(names, f"{part}_inputs"), getattr(names, f"{part}_labels")]
    if any(name is not None for name in given):
        return tuple(name or usual for name, usual in zip(given, _USUAL[part], strict=True))
    return next((pair for pair in tried if set(pair).issubset(held)), None)


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:12]]
    return ", ".join(shown) + (f" and {len(names) - 12} others" if len(names) > 12 else "")


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_part(name: str, part: str, inputs: Arrays, labels: Arrays) -> None:
    lengths = {}
    for kind, arrays in (("inputs", inputs), ("labels", labels)):
        for key, array in arrays.items() if isinstance(arrays, Mapping) else [("", arrays)]:
            shown = f"{part}_{kind}" + (f" {key!r}" if key else "")
            _check(name, shown, array)
            lengths[shown] = len(array)
    if len(set(lengths.values())) > 1:
        counts = [f"{length:,}" for length in lengths.values()]
        raise RecipeError(
            f"{name}: {' and '.join(lengths)} must have the same number of examples. Received: {' and '.join(counts)}."
        )


def _check(name: str, part: str, array: np.ndarray) -> None:
    if array.dtype.kind not in "biuf":
        raise RecipeError(f"{name}: {part} must be numbers. Received: an array of type {array.dtype}.")
    if array.ndim == 0 or array.size == 0:
        raise RecipeError(f"{name}: {part} must hold at least one example. Received: an array of shape {array.shape}.")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RecipeError(f"{name}: {part} must be finite. Received: NaN or infinity among them.")


def _check_same(name: str, part: str, train: Arrays, other: Arrays) -> None:
    if isinstance(train, Mapping) != isinstance(other, Mapping) or (
        isinstance(train, Mapping) and sorted(train) != sorted(other)
    ):
        raise RecipeError(f"{name}: the training and the {part} part must have inputs of the same names.")
    first, second = (mapped(lambda array: array.shape[1:], arrays) for arrays in (train, other))
    if first != second:
        raise RecipeError(
            f"{name}: inputs of the training and the {part} part must have one shape. Received: {first} and {second}."
        )


def _outline(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, dict | tuple | list) else kind
