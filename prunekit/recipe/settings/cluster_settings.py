"""Settings of the step kind cluster. Reads no file and imports neither Keras nor NumPy."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Discriminator, Tag, model_validator

from prunekit.recipe.settings.distill_settings import Distilled, check_distilled
from prunekit.recipe.settings.fields import (
    EXAMPLES,
    Count,
    Epochs,
    Memory,
    Positive,
    WeightPattern,
    WeightPatterns,
    refusal,
    shown,
)
from prunekit.recipe.settings.step_base import (
    CODEBOOKS,
    Invariant,
    StepSettings,
    epochs_text,
    patterns_text,
    training_text,
)
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.shorthands import Centroids, Clustering, Misfits


def _are_clusters(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 2 <= value <= 256


def _clusters(value: Any) -> Any:
    if _are_clusters(value):
        return value
    if isinstance(value, dict) and value and all(_are_clusters(one) or one == "float" for one in value.values()):
        return value
    raise refusal(
        "expected the number of values of a weight, 2 to 256, or numbers by patterns of layers, such as {head: 64, "
        f"'block_*': float}}. Received: {shown(value)}."
    )


def _granularity(value: Any) -> Any:
    if value in ("tensor", "channel") or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise refusal(f"expected tensor, channel, or a number of channels. Received: {shown(value)}.")


Clusters = Annotated[
    Annotated[int, Tag("(clusters)")] | Annotated[dict[WeightPattern, int | str], Tag("(patterns)")],
    Discriminator(lambda value: "(patterns)" if isinstance(value, dict) else "(clusters)"),
]


class Cluster(StepSettings):
    """A step that gives weights few different values, as `pk.cluster`; later trainings train these values.

    Attributes:
        epochs: Epochs in which the step trains the values, as a `ClusterCallback`; None = no training.
        learning_rate: Learning rate of this training; None means that of the recipe's compile settings.
        distill: What the model learns from a teacher in this training; None = nothing.
        examples: Number of training examples that values are fitted on.
    """

    example: ClassVar[str] = "{clusters: 16}"
    changes_weights: ClassVar[bool] = True
    leaves: ClassVar[Invariant | None] = CODEBOOKS
    epochs: Epochs | None = None
    learning_rate: Positive | None = None
    distill: Distilled = None
    clusters: Annotated[Clusters, BeforeValidator(_clusters)] = 16
    granularity: Annotated[int | str, BeforeValidator(_granularity)] = "tensor"
    method: Clustering = "auto"
    centroids: Centroids = "auto"
    correct_biases: bool | None = None
    include: WeightPatterns = ()
    exclude: WeightPatterns = ()
    misfits: Misfits = "skip"
    examples: Count = EXAMPLES
    memory: Memory = MEMORY

    @model_validator(mode="after")
    def _of_training(self) -> Self:
        if self.epochs is None and self.learning_rate is not None:
            raise refusal("learning_rate is about a training of the values: write epochs, too.", "learning_rate")
        return self

    @property
    def trains(self) -> bool:
        """True if the step trains the values."""
        return self.epochs is not None

    def check(self, earlier: Sequence[Any]) -> None:
        """Refuses what `StepSettings` refuses, and a distillation without a training."""
        super().check(earlier)
        check_distilled(self, earlier)

    def text(self) -> str:
        """Returns values, granularity, method, training and layers."""
        values = f"{self.clusters} values"
        if isinstance(self.clusters, dict):
            values = ", ".join(f"{pattern} {number}" for pattern, number in self.clusters.items())
        shared = f"{self.granularity} channels" if isinstance(self.granularity, int) else self.granularity
        method = [] if self.method == "auto" else [self.method]
        training = [] if self.epochs is None else [f"trained for {epochs_text(self.epochs)}"]
        return ", ".join([values, f"per {shared}", *method, *training, *training_text(self), *patterns_text(self)])
