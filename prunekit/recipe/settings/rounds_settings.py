"""Settings of the step kind rounds. Reads no file and imports neither Keras nor NumPy."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from prunekit.recipe.settings.fields import (
    Configured,
    Epochs,
    Positive,
    Sparsity,
    WeightPattern,
    WeightPatterns,
    name_of,
    refusal,
    registered,
)
from prunekit.recipe.settings.step_base import ZEROS, Bounds, Invariant, StepSettings, training_text
from prunekit.recipe.settings.step_settings import (
    Prune,
    checked_pattern,
    parse_pattern,
    weights_text,
)
from prunekit.sparsity.shorthands import ALLOCATIONS, CRITERIA, Misfits, sources_of


class Rounds(StepSettings):
    """A step that trains, and then prunes, rewinds and trains again in each of `rounds` rounds.

    The rewind point is the state at the start of the step.
    """

    example: ClassVar[str] = "{rounds: 5, sparsity: 0.8, epochs_per_round: 10}"
    former: ClassVar[Mapping[str, str]] = {"number": "rounds"}
    changes_weights: ClassVar[bool] = True
    leaves: ClassVar[Invariant | None] = ZEROS
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
    bounds: dict[WeightPattern, Bounds[Sparsity]] = {}
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

    @property
    def trains(self) -> bool:
        """True."""
        return True

    def text(self) -> str:
        """Returns rounds, sparsity, method and weights."""
        rewind = "no rewinding" if self.rewind == "none" else f"rewinding {self.rewind}"
        parts = [f"{self.rounds} rounds to {self.sparsity:g}, {self.epochs_per_round} epochs each", rewind]
        parts += training_text(self)
        parts += [str(self.criterion), self.pattern, str(self.allocation)]
        return ", ".join(parts + weights_text(self))

    def check(self, earlier: Sequence[Any]) -> None:
        """Refuses weights on grids, and earlier pruning."""
        super().check(earlier)
        if any(step.prunes for step in earlier):
            raise refusal(
                "rounds start from a model that no step has pruned. Remove the pruning steps before this one."
            )
