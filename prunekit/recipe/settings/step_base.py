"""The base class of the settings of all step kinds, and what several of them have. Reads no file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import model_validator

from prunekit.recipe.settings.fields import Settings, refusal


@dataclass(frozen=True)
class Invariant:
    """What a step leaves in the weights, and what each later step keeps or is refused for.

    Attributes:
        name: Name in the plural, such as "zeros".
        step: Kind of the step that leaves it.
        made: What this step did: "made weights zero".
    """

    name: str
    step: str
    made: str


ZEROS = Invariant("zeros", "prune", "made weights zero")
RANKS = Invariant("ranks", "factorize", "put two layers of low rank in the place of one")
CODEBOOKS = Invariant("codebooks", "cluster", "gave the weights few different values")
GRIDS = Invariant("grids", "quantize", "put the weights on integer grids and wrote their file")
LEVELS = Invariant("grids", "search", "chose the levels of all weights and wrote their file")


class StepSettings(Settings):
    """Settings of one step: a frozen pydantic model.

    Attributes:
        changes_weights: True if the step may change weights: the model is evaluated after it, unless the step returns
            metrics, and `verify` repeats it.
        returns_new_model: True if the step may replace the model by another object.
        leaves: What the step leaves in the weights; None = nothing that a later step could destroy.
        keeps: What the step keeps of that which earlier steps left. Masks keep zeros in every training.
        only_trains: True if the step trains the model and compresses nothing.
        checkpointed: True if a checkpoint follows the step. False suits steps that cost next to nothing to repeat.
    """

    changes_weights: ClassVar[bool] = False
    returns_new_model: ClassVar[bool] = False
    leaves: ClassVar[Invariant | None] = None
    keeps: ClassVar[frozenset[Invariant]] = frozenset({ZEROS, RANKS})
    only_trains: ClassVar[bool] = False
    checkpointed: ClassVar[bool] = True

    def text(self) -> str:
        """Returns the settings as one line of text, for terminal and plan."""
        return ""

    def check(self, earlier: Sequence[Any]) -> None:
        """Refuses settings that contradict the settings of earlier steps, by raising `fields.refusal(message, *path)`.

        The path begins at the settings.
        """
        left = [step.leaves for step in earlier if step.leaves is not None]
        destroyed = next((one for one in left if one not in self.keeps), None)
        if destroyed is not None and self.changes_weights:
            raise refusal(
                f"an earlier {destroyed.step} step {destroyed.made}, and this step changes them. Write the "
                f"{destroyed.step} step after this one."
            )

    @property
    def prunes(self) -> bool:
        """True if the step prunes the weights of its `include` and `exclude` to its `final_sparsity`."""
        return self.leaves == ZEROS

    @property
    def trains(self) -> bool:
        """True if the step runs the optimizer, so that it needs data and compile settings."""
        return False

    @property
    def reads_data(self) -> bool:
        """True if the step needs data for another reason than training."""
        return False

    @property
    def bounded_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the step compares with bounds, so that it needs data."""
        return ()

    def packs(self, name: str) -> bool:
        """Returns True if the step packs exported files of this format."""
        return False

    @property
    def written_formats(self) -> tuple[str, ...]:
        """Formats of the exported files that the step writes."""
        return ()


T = TypeVar("T", bound=float)


class Bounds(Settings, Generic[T]):
    """Bounds `min` and `max`; one of them may be left out."""

    example: ClassVar[str] = "{min: 0.2, max: 0.8}"
    min: T | None = None
    max: T | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.at_least_one("min", "max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise refusal(f"expected min <= max. Received: {self.min:g} and {self.max:g}.", "max")
        return self


def epochs_text(epochs: int) -> str:
    """Returns a number of epochs as text."""
    return f"{epochs} epoch{'s' if epochs > 1 else ''}"


def training_text(step: Any) -> list[str]:
    """Returns the learning rate and the teacher of a step's training, as parts of its text."""
    rate, distill = step.learning_rate, getattr(step, "distill", None)
    return [
        *([] if rate is None else [f"learning rate {rate:g}"]),
        *([] if distill is None else [distill.text()]),
    ]


def patterns_text(step: Any) -> list[str]:
    """Returns which layers and weights a step names, as parts of its text."""
    return [f"{name} {' '.join(given)}" for name in ("include", "exclude") if (given := getattr(step, name))]
