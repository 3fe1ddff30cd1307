"""Defines the recipe fields for the sources of model and data, and for the compile settings."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from prunekit.recipe.applications import REQUIRED, applications, arguments_of
from prunekit.recipe.fields import (
    Arguments,
    Count,
    Factory,
    FilePath,
    Listed,
    Positive,
    Settings,
    Size,
    Sparsity,
    Text,
    one_of,
    refusal,
    resolved_path,
    shown,
    unknown,
)

# Name in a recipe -> class in keras.optimizers. `keras.optimizers.get` lacks some of them and spells names differently.
OPTIMIZERS = {
    "adadelta": "Adadelta",
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamax": "Adamax",
    "adamw": "AdamW",
    "ftrl": "Ftrl",
    "lamb": "Lamb",
    "lion": "Lion",
    "muon": "Muon",
    "nadam": "Nadam",
    "rmsprop": "RMSprop",
    "schedule_free_adamw": "ScheduleFreeAdamW",
    "sgd": "SGD",
}
# Losses that can take unnormalised outputs -> class in keras.losses.
LOGIT_LOSSES = {
    "binary_crossentropy": "BinaryCrossentropy",
    "binary_focal_crossentropy": "BinaryFocalCrossentropy",
    "categorical_crossentropy": "CategoricalCrossentropy",
    "categorical_focal_crossentropy": "CategoricalFocalCrossentropy",
    "sparse_categorical_crossentropy": "SparseCategoricalCrossentropy",
}
LOSSES = (
    *LOGIT_LOSSES,
    "categorical_hinge",
    "cosine_similarity",
    "hinge",
    "huber",
    "kl_divergence",
    "log_cosh",
    "mae",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "mse",
    "poisson",
    "squared_hinge",
)
METRICS = (
    "accuracy",
    "auc",
    "binary_accuracy",
    "categorical_accuracy",
    "cosine_similarity",
    "mae",
    "mean_absolute_error",
    "mean_squared_error",
    "mse",
    "precision",
    "recall",
    "root_mean_squared_error",
    "sparse_categorical_accuracy",
    "sparse_top_k_categorical_accuracy",
    "top_k_categorical_accuracy",
)


IMAGENET = "imagenet"
WEIGHT_FILES = (".weights.h5", ".h5", ".keras")
# Fields beside `application`; the other arguments of its function are in `arguments`.
_BESIDE = ("input_shape", "classes", "weights")


def _application(value: str) -> str:
    if value not in applications():
        raise unknown("application", value, applications())
    return value


def _weights(value: str, info: ValidationInfo) -> str:
    if value == IMAGENET:
        return value
    if not value.endswith(WEIGHT_FILES):
        raise refusal(
            f"expected {IMAGENET}, null, or a file that ends in {', '.join(WEIGHT_FILES)}. Received: {shown(value)}."
        )
    return resolved_path(value, info)


class ModelSource(Settings):
    """Source of the model: a `.keras` file, a built-in model, a model of `keras.applications`, or a Python function.

    Attributes:
        application: Name of a model in `keras.applications`.
        input_shape: Its input shape (height, width, channels), without the batch. None: the default of Keras.
        classes: Number of classes of its classifier. None: the default of Keras, 1000.
        weights: "imagenet", which Keras downloads, or a file. None: initial weights from the seed of the recipe.
        arguments: Other arguments of the application's function, or all arguments of the factory.
    """

    example: ClassVar[str] = "{builtin: digits-cnn}"
    file: FilePath | None = None
    builtin: Literal["digits-cnn", "fashion-mlp", "fashion-cnn"] | None = None
    factory: Factory | None = None
    application: Annotated[str, AfterValidator(_application)] | None = None
    input_shape: Annotated[tuple[Size | None, Size | None, Size], Listed] | None = None
    classes: Size | None = None
    weights: Annotated[str, AfterValidator(_weights)] | None = None
    arguments: Arguments = {}

    @model_validator(mode="before")
    @classmethod
    def _arguments_in_their_place(cls, value: Any) -> Any:
        """Names the place of an argument that stands beside `application`."""
        name = value.get("application") if isinstance(value, Mapping) else None
        for key in value if isinstance(name, str) and name in applications() else ():
            if key not in cls.model_fields and key in arguments_of(name):
                raise refusal(f"{shown(key)} belongs inside 'arguments'.", key)
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.exactly_one("file", "builtin", "factory", "application")
        self.only_with("application", *_BESIDE)
        if self.application is not None:
            self._check_arguments(self.application)
        else:
            self.only_with("factory", "arguments")
        if self.file is not None and not self.file.endswith(".keras"):
            raise refusal(f"only .keras files are read (in safe mode). Received: {shown(self.file)}.", "file")
        return self

    def _check_arguments(self, name: str) -> None:
        known = {key: value for key, value in arguments_of(name).items() if key not in (*_BESIDE, "input_tensor")}
        for key, value in self.arguments.items():
            if key in _BESIDE:
                raise refusal(f"{key!r} belongs beside 'application', not inside 'arguments'.", "arguments", key)
            if key not in known:
                raise unknown("key", key, known, "arguments", key)
            _check_kind(value, known[key], "arguments", key)
        if self.arguments.get("include_top", True):
            if self.weights == IMAGENET and self.classes not in (None, 1000):
                raise refusal(
                    "the classifier of the imagenet weights has 1000 classes: leave out 'classes', or write "
                    "arguments: {include_top: false, pooling: avg} for the features below it.",
                    "classes",
                )
        elif self.classes is not None:
            raise refusal("without the classifier (include_top: false) there are no classes: leave it out.", "classes")

    @property
    def kind(self) -> str:
        """Kind of the source: file, builtin, factory or application."""
        return self.given("file", "builtin", "factory", "application")[0]

    @property
    def weights_file(self) -> str | None:
        """Path of the file with the weights of the application; None if the weights are not in a file."""
        return None if self.weights == IMAGENET else self.weights

    @property
    def text(self) -> str:
        """The source in a few words."""
        weights = {None: "", IMAGENET: ", imagenet weights, which Keras downloads"}
        return f"{self.kind} {getattr(self, self.kind)}" + weights.get(self.weights, f", weights of {self.weights}")


def _check_kind(value: Any, default: Any, *at: str) -> None:
    """Refuses a value of another kind than the default of an argument; None as a default accepts every kind."""
    kinds = (
        (bool, bool, "true or false"),
        ((int, float), (int, float), "a number"),
        (str, (str, type(None)), "text or null"),
    )
    for of_default, accepted, what in kinds:
        if default is not REQUIRED and isinstance(default, of_default):
            if not isinstance(value, accepted) or (isinstance(value, bool) and of_default is not bool):
                raise refusal(f"expected {what}. Received: {shown(value)}.", *at)
            return


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
    builtin: Literal["digits", "fashion-mnist"] | None = None
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
        if self.builtin == "digits" and self.path is not None:
            raise refusal("the digits come with scikit-learn, not from a folder: leave out 'path'.", "path")
        if self.scale is not None and (self.builtin or self.factory):
            raise refusal("built-in data and a factory's data are scaled already: leave out 'scale'.", "scale")
        return self

    @property
    def kind(self) -> str:
        """Kind of the source: builtin, idx, npz, npy or factory."""
        return self.given("builtin", "idx", "npz", "npy", "factory")[0]


class Optimizer(Settings):
    """A Keras optimizer; `arguments` are the other keyword arguments of its class."""

    example: ClassVar[str] = "{name: adam, learning_rate: 0.001}"
    name: Annotated[str, one_of("optimizer", OPTIMIZERS)] = "adam"
    learning_rate: Positive | None = None
    arguments: Arguments = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "learning_rate" in self.arguments:
            raise refusal(
                "'learning_rate' belongs beside 'name', not inside 'arguments'.", "arguments", "learning_rate"
            )
        return self


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Compile(Settings):
    """Compile settings of the model for training."""

    example: ClassVar[str] = "{optimizer: adam, loss: sparse_categorical_crossentropy}"
    optimizer: Annotated[Optimizer, BeforeValidator(_named)] = Optimizer()
    loss: Annotated[str, one_of("loss", LOSSES)] = "sparse_categorical_crossentropy"
    from_logits: bool = False
    metrics: Annotated[tuple[Annotated[str, one_of("metric", METRICS)], ...], Listed] = ("accuracy",)
    batch_size: Annotated[int, Field(ge=1, le=2**31 - 1)] = 32

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.from_logits and self.loss not in LOGIT_LOSSES:
            raise refusal(
                f"{self.loss!r} has no from_logits; only these have: {', '.join(LOGIT_LOSSES)}.", "from_logits"
            )
        return self
