"""Defines the recipe fields for the sources of model and data."""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from prunekit.recipe.fields import (
    Arguments,
    Count,
    Factory,
    FilePath,
    Positive,
    Settings,
    Sparsity,
    Text,
    refusal,
    shown,
)


class ModelSource(Settings):
    """Source of the model: a `.keras` file, a built-in model, or a Python function."""

    example: ClassVar[str] = "{builtin: digits-cnn}"
    file: FilePath | None = None
    builtin: Literal["digits-cnn", "fashion-mlp", "fashion-cnn", "diabetes-mlp"] | None = None
    factory: Factory | None = None
    arguments: Arguments = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.exactly_one("file", "builtin", "factory")
        self.only_with("factory", "arguments")
        if self.file is not None and not self.file.endswith(".keras"):
            raise refusal(f"only .keras files are read (in safe mode). Received: {shown(self.file)}.", "file")
        return self

    @property
    def kind(self) -> str:
        """Kind of the source: file, builtin or factory."""
        return self.given("file", "builtin", "factory")[0]


class ArrayFiles(Settings):
    """Paths of four files with idx or npy arrays."""

    example: ClassVar[str] = "{train_inputs: ..., train_labels: ..., test_inputs: ..., test_labels: ...}"
    train_inputs: FilePath
    train_labels: FilePath
    test_inputs: FilePath
    test_labels: FilePath


class NpzNames(Settings):
    """Names of the arrays inside an npz file."""

    example: ClassVar[str] = "{train_inputs: x_train, train_labels: y_train}"
    train_inputs: Text = "x_train"
    train_labels: Text = "y_train"
    test_inputs: Text = "x_test"
    test_labels: Text = "y_test"


class DataSource(Settings):
    """Source of the data, and the part of the data that is used.

    Attributes:
        path: Folder of the idx files of the built-in data set "fashion-mnist".
        validation_split: Fraction of the training data held out for validation; 0 validates on the test data.
        limit: Maximum number of examples, for the training data and for the test data separately.
        scale: Divisor of the inputs. None: 255 for uint8 inputs, 1 for others.
    """

    example: ClassVar[str] = "{builtin: digits}"
    builtin: Literal["digits", "diabetes", "fashion-mnist"] | None = None
    path: FilePath | None = None
    idx: ArrayFiles | None = None
    npz: FilePath | None = None
    arrays: NpzNames = NpzNames()
    npy: ArrayFiles | None = None
    factory: Factory | None = None
    arguments: Arguments = {}
    validation_split: Sparsity = 0.0
    limit: Count | None = None
    scale: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.exactly_one("builtin", "idx", "npz", "npy", "factory")
        self.only_with("factory", "arguments")
        self.only_with("npz", "arrays")
        self.only_with("builtin", "path")
        if self.builtin in ("digits", "diabetes") and self.path is not None:
            raise refusal(f"the {self.builtin} come with scikit-learn, not from a folder: leave out 'path'.", "path")
        if self.scale is not None and (self.builtin or self.factory):
            raise refusal("built-in data and a factory's data are scaled already: leave out 'scale'.", "scale")
        return self

    @property
    def kind(self) -> str:
        """Kind of the source: builtin, idx, npz, npy or factory."""
        return self.given("builtin", "idx", "npz", "npy", "factory")[0]
