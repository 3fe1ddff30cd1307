"""Settings of the step kinds shrink, remove_blocks and simplify. Reads no file and imports neither Keras nor NumPy."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from prunekit.recipe.settings.fields import (
    EXAMPLES,
    Configured,
    Count,
    Memory,
    Positive,
    WeightPatterns,
    Words,
    formerly,
    name_of,
    refusal,
    registered,
    share,
    shown,
)
from prunekit.recipe.settings.step_base import StepSettings, epochs_text, patterns_text, training_text
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.shorthands import (
    CALCULATED,
    CRITERIA,
    MEASURES,
    NONZERO,
    Approximation,
    ChannelAllocation,
    Reduction,
    Repair,
    sources_of,
)

_share = share("the share that is left, in (0, 1]", closed=True)
Share = Annotated[float, BeforeValidator(_share)]

# Of an allocation of channels.
PER_KIND = formerly("alike", "per_kind")
# What says which of the other channels go, and how.
_SELECTING = ("criterion", "reduction", "normalize", "allocation", "examples", "repair", "memory", "rounds")


def _channels(value: Any) -> Any:
    if value is None or value == NONZERO or (isinstance(value, int | float) and not isinstance(value, bool)):
        return _share(value)
    raise refusal(f"expected the share that is left, in (0, 1], or {NONZERO}. Received: {shown(value)}.")


class Shrink(StepSettings):
    """A step that removes channels, at once or in rounds with training after each removal.

    Attributes:
        channels: Share of the removable channels that is left after the step, in (0, 1]; "nonzero" removes those whose
            kernels are zero.
        parameters: Share of the parameters that is left.
        macs: Share of the multiply-accumulates that is left.
        bytes: Share of the bytes of the exported LiteRT file (float32) that is left.
        latency: Share of the file's latency on this machine that is left. Exactly one of the five is given.
        examples: Training examples that criterion and repair read.
        memory: Largest number of bytes of activations that are kept while the kept weights are repaired.
        rounds: Number of removals. The share that is left falls by the same factor in each.
        epochs_per_round: Epochs of training after each removal.
        learning_rate: Learning rate of the training; None means that of the compile settings.
    """

    example: ClassVar[str] = "{macs: 0.5}"
    former: ClassVar[Mapping[str, str]] = {"calibration": "examples"}
    changes_weights: ClassVar[bool] = True
    returns_new_model: ClassVar[bool] = True
    channels: Annotated[float | Literal["nonzero"] | None, BeforeValidator(_channels)] = None
    parameters: Share | None = None
    macs: Share | None = None
    bytes: Share | None = None
    latency: Share | None = None
    criterion: Annotated[str | Configured, registered(CRITERIA)] = "auto"
    reduction: Reduction = "mean"
    normalize: bool = True
    allocation: Annotated[Literal["auto", ChannelAllocation], PER_KIND] = "auto"
    minimum: Count = 1
    multiple: Count = 1
    include: WeightPatterns = ()
    exclude: WeightPatterns = ()
    approximate: Annotated[tuple[Approximation, ...], Words] = ()
    examples: Count | None = None
    repair: Repair | None = None
    memory: Memory = MEMORY
    rounds: Annotated[int, Field(ge=1, le=1000)] = 1
    epochs_per_round: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    learning_rate: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.exactly_one(*MEASURES)
        for name in _SELECTING if self.nonzero else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise refusal(
                    f"{name!r} has no effect on channels: {NONZERO}, which removes the channels whose kernels are "
                    "zero: leave it out.",
                    name,
                )
        self._check_criterion()
        if self.rounds > 1 and not self.epochs_per_round:
            raise refusal(
                f"{self.rounds} rounds train after each removal: add 'epochs_per_round', or leave 'rounds' out.",
                "rounds",
            )
        if self.learning_rate is not None and not self.epochs_per_round:
            raise refusal("'learning_rate' needs 'epochs_per_round', which is missing here.", "learning_rate")
        if self.examples is not None and not (self.may_repair or "data" in sources_of(self.needs)):
            raise refusal("'examples' needs 'repair', or a criterion that reads data.", "examples")
        return self

    def _check_criterion(self) -> None:
        name = name_of(self.criterion)
        row = CRITERIA[name]
        if "training" in sources_of(row.needs):
            raise refusal(
                f"channels are removed without training, and {name!r} measures how training changes the weights: "
                "choose another criterion.",
                "criterion",
            )
        given = (self.criterion.model_extra or {}) if isinstance(self.criterion, Configured) else {}
        rounds = given.get("rounds", row.options.get("rounds", (int, 1))[1])
        if rounds > 1:
            raise refusal(
                f"channels are selected once, and {name!r} selects in {rounds} rounds: choose another criterion.",
                "criterion",
            )

    @property
    def measure(self) -> str:
        """Name of the target: one of `MEASURES`."""
        return self.given(*MEASURES)[0]

    @property
    def nonzero(self) -> bool:
        """True if the channels whose kernels are zero are removed, and no others."""
        return self.channels == NONZERO

    @property
    def plans_widths(self) -> bool:
        """True if the plan knows how many channels each layer keeps, whatever the weights at the time of the step."""
        # "auto" tries allocations with their repair.
        even = self.allocation == "uniform" or (self.allocation == "auto" and self.repair == "none")
        return even and self.measure in CALCULATED and not self.nonzero

    @property
    def share(self) -> float:
        """Share that is left after the step; not for channels that are zero."""
        return float(getattr(self, self.measure))

    @property
    def shares(self) -> list[float]:
        """Share of the model before the step that is left after each round."""
        return [self.share ** (number / self.rounds) for number in range(1, self.rounds)] + [self.share]

    @property
    def epochs(self) -> int | None:
        """Number of epochs of the whole step; None without training."""
        return self.rounds * self.epochs_per_round or None

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the statistics that the criterion needs."""
        return CRITERIA[name_of(self.criterion)].needs

    @property
    def may_repair(self) -> bool:
        """True if the step may repair: removed channels that are zero need no repair."""
        return self.repair != "none" and not self.nonzero

    @property
    def reads_data(self) -> bool:
        """True if the step cannot do without a pass over data."""
        return self.examples is not None or "data" in sources_of(self.needs)

    @property
    def trains(self) -> bool:
        """True if epochs follow each removal."""
        return self.epochs_per_round > 0

    def text(self) -> str:
        """Returns target, rounds, method and layers."""
        parts = ["channels that are not zero"] if self.nonzero else [f"{self.measure} to {self.share:g}"]
        if self.rounds > 1:
            parts.append(f"in {self.rounds} rounds")
        if self.epochs_per_round:
            parts.append(f"{epochs_text(self.epochs_per_round)} {'each' if self.rounds > 1 else 'after the removal'}")
        parts += training_text(self)
        parts += [] if self.nonzero else [str(self.criterion), self.allocation]
        parts += [f"{name} {value}" for name in ("minimum", "multiple") if (value := getattr(self, name)) > 1]
        if self.repair is not None:
            parts.append(f"repair {self.repair}")
        if self.approximate:
            parts.append(f"approximate {' '.join(self.approximate)}")
        return ", ".join(parts + patterns_text(self))


class RemoveBlocks(StepSettings):
    """A step that removes the blocks whose removal changes the outputs least, as `pk.remove_blocks`.

    Attributes:
        blocks: Number of blocks.
        include: Patterns of blocks that may be removed, or of layers in them; empty = all.
        exclude: Patterns of blocks that stay.
        examples: Training examples on which the outputs are compared.
    """

    example: ClassVar[str] = "{blocks: 1}"
    former: ClassVar[Mapping[str, str]] = {"number": "blocks", "calibration": "examples"}
    changes_weights: ClassVar[bool] = True
    returns_new_model: ClassVar[bool] = True
    blocks: Count = 1
    include: WeightPatterns = ()
    exclude: WeightPatterns = ()
    examples: Count = EXAMPLES

    @property
    def reads_data(self) -> bool:
        """True."""
        return True

    def text(self) -> str:
        """Returns the number of blocks, and patterns."""
        return ", ".join([f"{self.blocks} block{'s' if self.blocks > 1 else ''}", *patterns_text(self)])


class Simplify(StepSettings):
    """A step that removes what inference does not need, as `pk.simplify`; the outputs stay equal."""

    example: ClassVar[str] = "{}"
    changes_weights: ClassVar[bool] = True
    returns_new_model: ClassVar[bool] = True

    def text(self) -> str:
        """Returns what is removed."""
        return "what inference does not need"
