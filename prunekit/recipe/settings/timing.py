"""Defines the durations and schedules of a recipe, in steps or epochs from the start of their recipe step."""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from prunekit.recipe.settings.fields import Listed, Settings, Sparsity, refusal
from prunekit.sparsity.schedules import SCHEDULES, ConstantSparsity, PolynomialDecay, Schedule


class Duration(Settings):
    """Time since the start of a recipe step: {steps: N} or {epochs: X}, where X may be a fraction."""

    example: ClassVar[str] = "{epochs: 9} or {steps: 500}"
    steps: Annotated[int, Field(ge=0, le=2**53)] | None = None
    epochs: Annotated[float, Field(ge=0.0, le=1e6)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.exactly_one("steps", "epochs")

    def in_steps(self, steps_per_epoch: int) -> int:
        """Returns the duration in optimizer updates, rounded."""
        return self.steps if self.steps is not None else round((self.epochs or 0.0) * steps_per_epoch)

    def after(self, other: "Duration") -> bool:
        """True if this time is later than `other`; False for different units, whose relation depends on the data."""
        if self.steps is not None and other.steps is not None:
            return self.steps > other.steps
        return self.epochs is not None and other.epochs is not None and self.epochs > other.epochs

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.steps is not None else f"{self.epochs:g} epochs"


START = Duration(steps=0)
Moments: TypeAlias = dict[tuple[str | int, ...], Duration]
Frequency = Annotated[int, Field(ge=1, le=2**53)]
# Duration of a schedule -> argument of the schedule's class, in optimizer updates.
_ARGUMENTS: dict[str | int, str] = {"begin": "begin_step", "end": "end_step", "at": "step"}


class _ScheduleSettings(Settings):
    """Base class of all schedules of a recipe."""

    example: ClassVar[str] = "{type: polynomial_decay, final_sparsity: 0.9}"
    type: str

    def final_at(self) -> tuple[str | int, ...]:
        """Returns the path of the final sparsity inside the mapping, for errors."""
        return ("final_sparsity",)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        begin, end = (self.moments().get((name,)) for name in ("begin", "end"))
        if begin is not None and end is not None and begin.after(end):
            raise refusal(f"the schedule ends before it begins: begin={begin}, end={end}.", "end")
        return self

    def moments(self) -> Moments:
        """Returns every duration of the schedule, by its path inside the mapping."""
        return {(name,): value for name, value in self if isinstance(value, Duration)}

    def numbers(self, steps_per_epoch: int) -> dict[str, Any]:
        """Returns the arguments of the schedule's class, with durations as optimizer updates."""
        steps = {_ARGUMENTS[name]: one.in_steps(steps_per_epoch) for (name,), one in self.moments().items()}
        return self.model_dump(exclude={"type", "begin", "end", "at"}) | steps

    def resolve(self, steps_per_epoch: int) -> Schedule:
        """Returns the schedule in optimizer updates.

        Args:
            steps_per_epoch: Optimizer updates in one epoch.

        Raises:
            ValueError: Durations in different units contradict each other, for example an end before the begin.
        """
        return SCHEDULES[self.type](**self.numbers(steps_per_epoch))


class _Gradual(_ScheduleSettings):
    initial_sparsity: Sparsity = PolynomialDecay.initial_sparsity
    final_sparsity: Sparsity
    begin: Duration = START
    end: Duration | None = None
    frequency: Frequency | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.initial_sparsity > self.final_sparsity:
            raise refusal(
                "a schedule never restores pruned weights: expected initial_sparsity <= final_sparsity. "
                f"Received: {self.initial_sparsity:g} and {self.final_sparsity:g}.",
                "initial_sparsity" if "initial_sparsity" in self.model_fields_set else "final_sparsity",
            )
        return self


class PolynomialDecaySettings(_Gradual):
    """Recipe fields of PolynomialDecay."""

    type: Literal["polynomial_decay"]
    power: Annotated[float, Field(gt=0.0, le=1000.0)] = PolynomialDecay.power


class LinearDecaySettings(_Gradual):
    """Recipe fields of LinearDecay."""

    type: Literal["linear"]


class CosineDecaySettings(_Gradual):
    """Recipe fields of CosineDecay."""

    type: Literal["cosine"]


class ExponentialDecaySettings(_Gradual):
    """Recipe fields of ExponentialDecay."""

    type: Literal["exponential"]


class ConstantSettings(_ScheduleSettings):
    """Recipe fields of ConstantSparsity; without `end`, mask updates continue for the whole recipe step."""

    type: Literal["constant"]
    target_sparsity: Sparsity
    begin: Duration = START
    end: Duration | None = None
    frequency: Frequency = ConstantSparsity.frequency

    @property
    def final_sparsity(self) -> float:
        """Final sparsity: `target_sparsity`."""
        return self.target_sparsity

    def final_at(self) -> tuple[str | int, ...]:
        return ("target_sparsity",)


class OneShotSettings(_ScheduleSettings):
    """Recipe fields of OneShot: one mask update at `at`, then training continues with this mask."""

    type: Literal["one_shot"]
    sparsity: Sparsity
    at: Duration = START

    @property
    def final_sparsity(self) -> float:
        """Final sparsity: `sparsity`."""
        return self.sparsity

    def final_at(self) -> tuple[str | int, ...]:
        return ("sparsity",)


class Stage(Settings):
    """One sparsity of a multi-step schedule, and the time from which it applies."""

    example: ClassVar[str] = "{at: {epochs: 2}, sparsity: 0.5}"
    at: Duration
    sparsity: Sparsity


class MultiStepSettings(_ScheduleSettings):
    """Recipe fields of MultiStep; times and sparsities both increase."""

    type: Literal["multi_step"]
    sparsities: Annotated[tuple[Stage, ...], Listed, Field(min_length=1, max_length=10_000)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i in range(1, len(self.sparsities)):
            before, stage = self.sparsities[i - 1], self.sparsities[i]
            same_unit = (before.at.steps is None) == (stage.at.steps is None)
            if same_unit and not stage.at.after(before.at):
                raise refusal(
                    f"times rise from stage to stage. Received: {before.at}, then {stage.at}.", "sparsities", i, "at"
                )
            if stage.sparsity <= before.sparsity:
                raise refusal(
                    f"sparsities rise from stage to stage. Received: {before.sparsity:g}, then {stage.sparsity:g}.",
                    *("sparsities", i, "sparsity"),
                )
        return self

    def final_at(self) -> tuple[str | int, ...]:
        return ("sparsities", len(self.sparsities) - 1, "sparsity")

    @property
    def final_sparsity(self) -> float:
        """Final sparsity: the sparsity of the last stage."""
        return self.sparsities[-1].sparsity

    def moments(self) -> Moments:
        return {("sparsities", i, "at"): stage.at for i, stage in enumerate(self.sparsities)}

    def numbers(self, steps_per_epoch: int) -> dict[str, Any]:
        pairs = tuple((stage.at.in_steps(steps_per_epoch), stage.sparsity) for stage in self.sparsities)
        return {"sparsities": pairs}


ScheduleSettings: TypeAlias = Annotated[
    PolynomialDecaySettings
    | LinearDecaySettings
    | CosineDecaySettings
    | ExponentialDecaySettings
    | ConstantSettings
    | OneShotSettings
    | MultiStepSettings,
    Field(discriminator="type"),
]
