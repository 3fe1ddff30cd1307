"""Defines the recipe fields for the source of the model."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ValidationInfo, model_validator

from prunekit.recipe.settings.applications import REQUIRED, applications, arguments_of
from prunekit.recipe.settings.fields import (
    Arguments,
    Factory,
    FilePath,
    Listed,
    Settings,
    Size,
    refusal,
    resolved_path,
    shown,
    unknown,
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
    builtin: Literal["digits-cnn", "fashion-mlp", "fashion-cnn", "diabetes-mlp"] | None = None
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
