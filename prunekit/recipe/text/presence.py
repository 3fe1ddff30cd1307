"""Checks that the files a recipe names exist, and that a run keeps them; imports neither Keras nor NumPy."""

import os
from collections.abc import Iterator
from pathlib import Path as FilePath

from prunekit.recipe.settings.data_source import ArrayFiles, DataSource
from prunekit.recipe.settings.schema import Recipe
from prunekit.recipe.text.loader import document_of
from prunekit.recipe.text.yaml_reader import Path, RecipeError, path_text

_FOLDERS = ("path", "images", "tfds_saved")


def check_named_files(recipe: Recipe, source: str | os.PathLike[str]) -> None:
    """Checks that all files and folders that the recipe names exist.

    Args:
        recipe: Recipe to check.
        source: Path of the recipe file, or name of the built-in recipe, that the recipe was read from.

    Raises:
        RecipeError: Files are missing; the message names all of them and has the position of the first.
    """
    missing = [(place, path) for place, path, kind in _named_files(recipe) if not exists(path, kind)]
    if missing:
        document = document_of(source)
        listed = "; ".join(f"{path_text(place)}: {path}" for place, path in missing)
        raise RecipeError(
            f"expected the files that the recipe names. Received none at {listed}. Put them there, or correct the "
            "paths, which count from the recipe's folder.",
            document.source,
            *(document.position(missing[0][0]) or ()),
        )


def check_sources_kept(recipe: Recipe, *written: FilePath) -> None:
    """Checks that a run replaces no file that the recipe reads: it may be the only copy.

    Args:
        recipe: Recipe that is going to be run.
        written: Files and folders that are replaced or removed.

    Raises:
        RecipeError: A file or folder that the recipe names is one of these, or lies in one.
    """
    for place, name, _ in _named_files(recipe):
        source = FilePath(name).resolve()
        for target in map(FilePath.resolve, written):
            if target == source or target in source.parents:
                raise RecipeError(
                    f"the run reads {name} ({path_text(place)}), which lies in the output directory and would be "
                    "replaced. Choose another output directory, or move that file."
                )


def exists(path: str, kind: str) -> bool:
    """Returns True if there is such a "file" or "folder"."""
    return os.path.isdir(path) if kind == "folder" else os.path.isfile(path)


def data_files(data: DataSource) -> Iterator[tuple[Path, str, str]]:
    """Yields (place in `data`, path, "file" or "folder") for each path that the settings of data name."""
    # `test` is a file beside csv, and a folder beside images.
    for name in ("npz", "csv", *_FOLDERS, "test"):
        path = getattr(data, name)
        if isinstance(path, str):
            yield (name,), path, "folder" if name in _FOLDERS or (name == "test" and data.csv is None) else "file"
    for name in ("idx", "npy"):
        files = getattr(data, name)
        for part in ArrayFiles.model_fields if files is not None else ():
            yield (name, part), getattr(files, part), "file"


def _named_files(recipe: Recipe) -> Iterator[tuple[Path, str, str]]:
    """Yields (place in the recipe, path, "file" or "folder") for each path that the recipe names."""
    if recipe.model is not None and recipe.model.file is not None:
        yield ("model", "file"), recipe.model.file, "file"
    if recipe.model is not None and recipe.model.weights_file is not None:
        yield ("model", "weights"), recipe.model.weights_file, "file"
    for place, path, kind in data_files(recipe.data) if recipe.data is not None else ():
        yield ("data", *place), path, kind
