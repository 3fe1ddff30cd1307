"""Defines the recipe fields for the compile settings: optimizer, losses, metrics. Imports neither Keras nor NumPy."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from prunekit.anatomy.records.keras_metrics import KERAS_METRICS
from prunekit.recipe.settings.fields import (
    Arguments,
    Factory,
    Listed,
    Positive,
    Settings,
    Text,
    one_of,
    refusal,
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
# Losses of classification: without `metrics`, a recipe with one of them measures the accuracy.
CLASS_LOSSES = (*LOGIT_LOSSES, "categorical_hinge", "hinge", "squared_hinge")
LOSSES = (
    *CLASS_LOSSES,
    "cosine_similarity",
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
)


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


class LossFactory(Settings):
    """A loss that a Python function returns: a `keras.losses.Loss`, or a function of labels and outputs."""

    example: ClassVar[str] = "{factory: my_package.losses:weighted_error}"
    factory: Factory
    arguments: Arguments = {}


class MetricSettings(Settings):
    """A metric of Keras with arguments or another name, or a metric that a Python function returns.

    Attributes:
        metric: Name of a Keras metric.
        factory: Function that returns a `keras.metrics.Metric`, or a function of labels and outputs.
        arguments: Keyword arguments of the metric's class, or of the function `factory`.
        name: Name in the report; None takes that of the metric.
        direction: "max" if higher values are better, else "min"; known for the metrics of Keras.
    """

    example: ClassVar[str] = "{metric: auc, arguments: {curve: PR}, name: pr_auc}"
    metric: Annotated[str, one_of("metric", KERAS_METRICS)] | None = None
    factory: Factory | None = None
    arguments: Arguments = {}
    name: Text | None = None
    direction: Literal["min", "max"] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.exactly_one("metric", "factory")
        self.only_with("factory", "direction")
        if self.metric is not None:
            if self.metric == "accuracy" and self.arguments:
                raise refusal(
                    "Keras chooses the class of 'accuracy' by the shapes, so it takes no arguments: write "
                    "binary_accuracy, categorical_accuracy or sparse_categorical_accuracy.",
                    "metric",
                )
            missing = [name for name in KERAS_METRICS[self.metric].needs if name not in self.arguments]
            if missing:
                raise refusal(f"{self.metric!r} needs the arguments {', '.join(missing)}.", "arguments")
        return self


class Monitor(Settings):
    """The main metric of a run, by its name in the results, and its direction where that is not known."""

    example: ClassVar[str] = "mae, or {name: my_score, direction: max}"
    name: Text
    direction: Literal["min", "max"] | None = None


def _tag(value: Any) -> str:
    """Returns which of the forms below a value has; the tags are no keys of a recipe."""
    if isinstance(value, str):
        return "(name)"
    if isinstance(value, (LossFactory, MetricSettings)):
        return "(settings)"
    if isinstance(value, (list, tuple)):
        return "(list)"
    return "(settings)" if isinstance(value, Mapping) and "factory" in value else "(by output)"


def _needs_no_argument(value: str) -> str:
    needs = KERAS_METRICS[value].needs if value in KERAS_METRICS else ()
    if needs:
        listed = ", ".join(f"{name}: ..." for name in needs)
        raise refusal(f"{value!r} needs arguments: write {{metric: {value}, arguments: {{{listed}}}}}.")
    return value


LossName = Annotated[str, one_of("loss", LOSSES)]
OneLoss = Annotated[
    Annotated[LossName, Tag("(name)")] | Annotated[LossFactory, Tag("(settings)")],
    Discriminator(lambda value: "(name)" if isinstance(value, str) else "(settings)"),
]
Losses = Annotated[
    Annotated[LossName, Tag("(name)")]
    | Annotated[LossFactory, Tag("(settings)")]
    | Annotated[dict[str, OneLoss], Field(min_length=1), Tag("(by output)")],
    # A list is refused as a mapping.
    Discriminator(lambda value: {"(list)": "(by output)"}.get(_tag(value), _tag(value))),
]
MetricName = Annotated[str, one_of("metric", KERAS_METRICS), BeforeValidator(_needs_no_argument)]
OneMetric = Annotated[
    Annotated[MetricName, Tag("(name)")] | Annotated[MetricSettings, Tag("(settings)")],
    Discriminator(lambda value: "(name)" if isinstance(value, str) else "(settings)"),
]
MetricList = Annotated[tuple[OneMetric, ...], Listed]
Metrics = Annotated[
    Annotated[MetricList, Tag("(list)")] | Annotated[dict[str, MetricList], Tag("(by output)")],
    Discriminator(lambda value: "(by output)" if isinstance(value, Mapping) else "(list)"),
]
MetricEntry: TypeAlias = str | MetricSettings


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Compile(Settings):
    """Compile settings of the model for training.

    Attributes:
        loss: Name of a Keras loss, a function that makes a loss, or a mapping output -> loss.
        loss_weights: Output -> factor of its loss in the sum; 1 for outputs that are not named.
        from_logits: True if losses of classification are given logits, False for probabilities; None: as the outputs of
            the first training examples are.
        metrics: Metrics of every output, or a mapping output -> metrics. None: the accuracy for losses of
            classification, else no metric besides the loss.
        weighted_metrics: Metrics that weight the examples by the data's sample weights.
        monitor: The main metric. None: the first metric, else the loss.
    """

    example: ClassVar[str] = "{optimizer: adam, loss: sparse_categorical_crossentropy}"
    optimizer: Annotated[Optimizer, BeforeValidator(_named)] = Optimizer()
    loss: Losses = "sparse_categorical_crossentropy"
    loss_weights: dict[str, Positive] | None = None
    from_logits: bool | None = None
    metrics: Metrics | None = None
    weighted_metrics: Metrics | None = None
    monitor: Annotated[Monitor, BeforeValidator(_named)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=2**31 - 1)] = 32

    @model_validator(mode="before")
    @classmethod
    def _default_metrics(cls, value: Any) -> Any:
        # Written out, so that the locked recipe says which metrics the run measured.
        if isinstance(value, Mapping) and value.get("metrics") is None:
            loss = value.get("loss", "sparse_categorical_crossentropy")
            return {**value, "metrics": ["accuracy"] if isinstance(loss, str) and loss in CLASS_LOSSES else []}
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = {loss for _, loss in self.losses() if isinstance(loss, str)}
        if self.from_logits and not names & set(LOGIT_LOSSES):
            raise refusal(
                f"{', '.join(map(repr, sorted(names))) or 'a loss of a factory'} has no from_logits; only these have: "
                f"{', '.join(LOGIT_LOSSES)}.",
                "from_logits",
            )
        if self.loss_weights is not None and isinstance(self.loss, dict):
            unknown = [name for name in self.loss_weights if name not in self.loss]
            if unknown:
                raise refusal(
                    f"the loss of output {unknown[0]!r} has a weight, but 'loss' does not name that output "
                    f"(it names {', '.join(self.loss)}).",
                    "loss_weights",
                    unknown[0],
                )
        return self

    def losses(self) -> Iterator[tuple[str | None, str | LossFactory]]:
        """Yields (output, loss); the output is None if the loss is that of every output."""
        if isinstance(self.loss, dict):
            yield from self.loss.items()
        else:
            yield None, self.loss

    def entries(self) -> Iterator[tuple[str | None, MetricEntry, bool]]:
        """Yields (output, metric, True for a weighted metric); the output is None for metrics of every output."""
        for metrics, weighted in ((self.metrics, False), (self.weighted_metrics, True)):
            by_output = metrics if isinstance(metrics, dict) else {None: metrics or ()}
            for output, entries in by_output.items():
                for entry in entries:
                    yield output, entry, weighted

    @property
    def factories(self) -> list[str]:
        """The Python functions that the settings name."""
        makers = [loss for _, loss in self.losses()] + [entry for _, entry, _ in self.entries()]
        return [made.factory for made in makers if not isinstance(made, str) and made.factory is not None]
