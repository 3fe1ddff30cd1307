"""Whether the files that a recipe names are there. Reads none of them, and imports neither Keras nor NumPy."""

import os
from collections.abc import Iterator

from prunekit.recipe.schema import Recipe
from prunekit.recipe.sources import ArrayFiles
from prunekit.recipe.yaml_reader import RecipeError


def check_named_files(recipe: Recipe, source: str) -> None:
    """Raises where a file that the recipe names is missing.

    Args:
        recipe: The recipe.
        source: Where it comes from, for the message.

    Raises:
        RecipeError: Files are missing; it names all of them.
    """
    missing = [f"{place}: {path}" for place, path, is_there in _named_files(recipe) if not is_there]
    if missing:
        raise RecipeError(
            f"expected the files that the recipe names. Received none at {'; '.join(missing)}. Put them there, or "
            "correct the paths, which count from the recipe's folder.",
            source,
        )


def _named_files(recipe: Recipe) -> Iterator[tuple[str, str, bool]]:
    """(place in the recipe, path, whether it is there)."""
    if recipe.model is not None and recipe.model.file is not None:
        yield "model.file", recipe.model.file, os.path.isfile(recipe.model.file)
    if recipe.data is None:
        return
    if recipe.data.path is not None:
        yield "data.path", recipe.data.path, os.path.isdir(recipe.data.path)
    if recipe.data.npz is not None:
        yield "data.npz", recipe.data.npz, os.path.isfile(recipe.data.npz)
    for kind in ("idx", "npy"):
        files = getattr(recipe.data, kind)
        for part in ArrayFiles.model_fields if files is not None else ():
            yield f"data.{kind}.{part}", getattr(files, part), os.path.isfile(getattr(files, part))
