"""Reads the built-in data sets: scikit-learn's digits and diabetes data, and the files of Fashion-MNIST."""

from typing import Any

import numpy as np

from prunekit.recipe.datasets.arrays import PARTS, opened, with_channel
from prunekit.recipe.datasets.builtin_files import GET_DIGITS, fashion_files
from prunekit.recipe.datasets.idx import read_idx
from prunekit.recipe.datasets.parts import Opened
from prunekit.recipe.settings.data_source import DataSource
from prunekit.recipe.text.loader import RecipeError

_DIGITS_TEST = 360
_DIABETES_TEST = 88


def open_builtin(source: DataSource) -> Opened:
    """Returns the built-in data set that a recipe names.

    Raises:
        RecipeError: A package or a file is missing; the message explains how to get it.
    """
    if source.builtin == "digits":
        return opened("digits", _digits())
    if source.builtin == "diabetes":
        return opened("diabetes", _diabetes())
    paths = fashion_files(source.path)
    return opened(str(source.builtin), with_channel({part: read_idx(path) for part, path in paths.items()}))


def _digits() -> dict[str, np.ndarray]:
    """Returns scikit-learn's copy of the UCI digits: 1,797 images of 8x8 in [0, 1], split into 1,437 + 360."""
    digits = _sklearn("digits").load_digits()
    inputs = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    # The last images of the file are by other writers than the first.
    return _shuffled(inputs, digits.target.astype("int64"), _DIGITS_TEST)


def _diabetes() -> dict[str, np.ndarray]:
    """Returns scikit-learn's diabetes data: 442 patients, 10 standardised measurements, split into 354 + 88.

    The target is the progression of the disease after one year, 25 to 346.

    Source: Efron, Hastie, Johnstone and Tibshirani 2004, Least Angle Regression, Annals of Statistics 32.
    """
    inputs, target = _sklearn("diabetes").load_diabetes(return_X_y=True)
    # scikit-learn scales each column to a sum of squares of 1.
    return _shuffled((inputs * np.sqrt(len(inputs))).astype("float32"), target.astype("float32"), _DIABETES_TEST)


def _sklearn(name: str) -> Any:
    try:
        import sklearn.datasets
    except ImportError as error:
        raise RecipeError(f"the {name} come with scikit-learn, which is not installed: {GET_DIGITS}.") from error
    return sklearn.datasets


def _shuffled(inputs: np.ndarray, labels: np.ndarray, held_out: int) -> dict[str, np.ndarray]:
    """Returns the examples in a random order, the last `held_out` as the test part.

    The split does not depend on the recipe's seed, so that metrics of different seeds are comparable.
    """
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:-held_out], order[-held_out:]
    return dict(zip(PARTS, (inputs[train], labels[train], inputs[test], labels[test]), strict=True))
