"""Finds the files of built-in data sets without Keras, since `prunekit doctor` also runs where Keras does not start."""

import os
from pathlib import Path

from prunekit.recipe.text.loader import RecipeError

# Commands that install missing data.
GET_DIGITS = "pip install 'prunekit[examples]'"
GET_FASHION = (
    "apt install dataset-fashion-mnist, or have Keras download them (30 MB) with "
    "keras.datasets.fashion_mnist.load_data()"
)
# Install folder of Debian's package.
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
FASHION_FILES = {
    "train_inputs": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_inputs": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def fashion_files(folder: str | os.PathLike[str] | None = None) -> dict[str, Path]:
    """Returns the paths of the four idx files of Fashion-MNIST, raw or gzip; downloads nothing.

    Args:
        folder: Folder to search; None searches the folders of Debian's package and of Keras' cache.

    Raises:
        RecipeError: The files are missing; the message explains how to get them.
    """
    keras_home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    folders = [Path(folder)] if folder is not None else [DEBIAN_FASHION, keras_home / "datasets" / "fashion-mnist"]
    for candidate in folders:
        found = {
            part: path
            for part, stem in FASHION_FILES.items()
            for path in (candidate / stem, candidate / f"{stem}.gz")
            if path.is_file()
        }
        if len(found) == len(FASHION_FILES):
            return found
    raise RecipeError(
        f"the files of Fashion-MNIST ({', '.join(FASHION_FILES.values())}, raw or .gz) are not in "
        f"{' or '.join(map(str, folders))}. Get them: {GET_FASHION}; or name their folder: "
        "data: {builtin: fashion-mnist, path: FOLDER}."
    )
