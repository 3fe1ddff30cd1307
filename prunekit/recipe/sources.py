"""Defines the recipe fields for the source of the model and for the compile settings."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from prunekit.recipe.fields import (
    Arguments,
    Factory,
    FilePath,
    Listed,
    Positive,
    Settings,
    one_of,
    refusal,
    shown,
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


class ModelSource(Settings):
    """Source of the model: a `.keras` file, a built-in model, or a Python function."""

    example: ClassVar[str] = "{builtin: digits-cnn}"
    file: FilePath | None = None
    builtin: Literal["digits-cnn", "fashion-mlp", "fashion-cnn"] | None = None
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
