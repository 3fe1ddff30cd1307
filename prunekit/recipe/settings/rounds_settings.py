"""Settings of the step kind rounds. Reads no file and imports neither Keras nor NumPy."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from prunekit.recipe.settings.fields import (
    Configured,
    Epochs,
    Positive,
    Settings,
    Sparsity,
    WeightPattern,
    WeightPatterns,
    name_of,
    refusal,
    registered,
)
from prunekit.recipe.settings.step_settings import Prune, WeightBounds, checked_pattern, parse_pattern
from prunekit.sparsity.shorthands import ALLOCATIONS, CRITERIA, Misfits, sources_of


class Rounds(Settings):
    """A step that trains, and then prunes, rewinds and trains again in each of `rounds` rounds.

    The rewind point is the state at the start of the step.
    """

    example: ClassVar[str] = "{rounds: 5, sparsity: 0.8, epochs_per_round: 10}"
    former: ClassVar[Mapping[str, str]] = {"number": "rounds"}
    rounds: Annotated[int, Field(ge=1, le=1000)]
    sparsity: Sparsity
    epochs_per_round: Epochs
    rewind: Literal["weights", "none"] = "weights"
    learning_rate: Positive | None = None
    criterion: Annotated[str | Configured, registered(CRITERIA)] = "auto"
    pattern: Annotated[str, AfterValidator(checked_pattern)] = "unstructured"
    allocation: Annotated[str | Configured, registered(ALLOCATIONS)] = "auto"
    include: WeightPatterns = ()
    exclude: WeightPatterns = ()
    keep_one: bool = True
    overrides: dict[WeightPattern, Sparsity] = {}
    bounds: dict[WeightPattern, WeightBounds] = {}
    misfits: Misfits = "error"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sparsity == 0:
            raise refusal("rounds prune something: expected a sparsity above 0.", "sparsity")
        if parse_pattern(self.pattern).kind == "nm":
            raise refusal(
                f"each round has another sparsity, and {self.pattern} has one: prune gradually with a prune step, or "
                "choose another pattern.",
                "pattern",
            )
        if "training" in sources_of(CRITERIA[name_of(self.criterion)].needs):
            raise refusal(
                f"rounds prune between trainings, and {name_of(self.criterion)!r} measures how training changes the "
                "weights: choose another criterion.",
                "criterion",
            )
        return self

    @property
    def epochs(self) -> int:
        """Number of epochs of the whole step."""
        return (self.rounds + 1) * self.epochs_per_round

    @property
    def final_sparsity(self) -> float:
        """Final sparsity of the step."""
        return self.sparsity

    @property
    def last_pruning(self) -> Prune:
        """Settings of the last round's pruning; the training after it repairs."""
        # The learning rate is that of the trainings.
        shared = (Prune.model_fields.keys() & Rounds.model_fields.keys()) - {"learning_rate"}
        return Prune(repair="none", **{name: getattr(self, name) for name in shared})
