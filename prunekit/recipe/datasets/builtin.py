"""Reads the built-in data sets: scikit-learn's digits, and the files of Fashion-MNIST."""

import os
from pathlib import Path

import numpy as np

from prunekit.recipe.data_source import DataSource
from prunekit.recipe.datasets.arrays import PARTS, opened, with_channel
from prunekit.recipe.datasets.opened import Opened
from prunekit.recipe.idx import read_idx
from prunekit.recipe.loader import RecipeError

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
_DIGITS_TEST = 360


def open_builtin(source: DataSource) -> Opened:
    """Returns the built-in data set that a recipe names.

    Raises:
        RecipeError: A package or a file is missing; the message explains how to get it.
    """
    if source.builtin == "digits":
        return opened("digits", _digits())
    paths = fashion_files(source.path)
    return opened(str(source.builtin), with_channel({part: read_idx(path) for part, path in paths.items()}))


def _digits() -> dict[str, np.ndarray]:
    """Returns scikit-learn's copy of the UCI digits: 1,797 images of 8x8 in [0, 1], split into 1,437 + 360."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RecipeError(f"the digits come with scikit-learn, which is not installed: {GET_DIGITS}.") from error
    digits = load_digits()
    inputs = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    labels = digits.target.astype("int64")
    # Shuffle: the last images of the file are by other writers than the first. The split does not depend on the
    # recipe's seed, so that accuracies of different seeds are comparable.
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:-_DIGITS_TEST], order[-_DIGITS_TEST:]
    return dict(zip(PARTS, (inputs[train], labels[train], inputs[test], labels[test]), strict=True))


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
