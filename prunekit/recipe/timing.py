"""Durations and schedules as a recipe writes them: in steps or epochs, counted from the start of their own step."""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from prunekit.recipe.fields import Listed, Settings, Sparsity, refusal
from prunekit.sparsity.schedules import SCHEDULES, ConstantSparsity, PolynomialDecay, Schedule


class Duration(Settings):
    """A point in a step, counted from that step's start: {steps: N} or {epochs: X}. X may be a fraction."""

    example: ClassVar[str] = "{epochs: 9} or {steps: 500}"
    steps: Annotated[int, Field(ge=0, le=2**53)] | None = None
    epochs: Annotated[float, Field(ge=0.0, le=1e6)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.exactly_one("steps", "epochs")

    def in_steps(self, steps_per_epoch: int) -> int:
        """The number of optimizer updates, rounded."""
        return self.steps if self.steps is not None else round((self.epochs or 0.0) * steps_per_epoch)

    def after(self, other: "Duration") -> bool:
        """Whether this is known to be later than `other`: False for different units, which only the data relate."""
        if self.steps is not None and other.steps is not None:
            return self.steps > other.steps
        return self.epochs is not None and other.epochs is not None and self.epochs > other.epochs

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.steps is not None else f"{self.epochs:g} epochs"


START = Duration(steps=0)
Moments: TypeAlias = dict[tuple[str | int, ...], Duration]
Frequency = Annotated[int, Field(ge=1, le=2**53)]


class _ScheduleSettings(Settings):
    """Common to all schedules of a recipe."""

    example: ClassVar[str] = "{type: polynomial_decay, final_sparsity: 0.9, end: {epochs: 9}}"
    type: str

    def final_at(self) -> tuple[str | int, ...]:
        """The path of the final sparsity inside the mapping, for errors."""
        return ("final_sparsity",)

    def moments(self) -> Moments:
        """Every duration of the schedule, by its path inside the mapping."""
        raise NotImplementedError

    def numbers(self, steps_per_epoch: int, offset: int) -> dict[str, Any]:
        """The arguments of the schedule's class."""
        raise NotImplementedError

    def resolve(self, steps_per_epoch: int, offset: int = 0) -> Schedule:
        """The schedule in optimizer updates.

        Args:
            steps_per_epoch: Optimizer updates in one epoch.
            offset: Updates behind the optimizer when the step starts, from which recipe durations count.

        Raises:
            ValueError: The durations, in different units, contradict one another.
        """
        return SCHEDULES[self.type](**self.numbers(steps_per_epoch, offset))


class _Gradual(_ScheduleSettings):
    initial_sparsity: Sparsity = PolynomialDecay.initial_sparsity
    final_sparsity: Sparsity
    begin: Duration = START
    end: Duration
    frequency: Frequency = PolynomialDecay.frequency

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.begin.after(self.end):
            raise refusal(f"the schedule ends before it begins: begin={self.begin}, end={self.end}.", "end")
        if self.initial_sparsity > self.final_sparsity:
            raise refusal(
                "a schedule never gives weights back: expected initial_sparsity <= final_sparsity. "
                f"Received: {self.initial_sparsity:g} and {self.final_sparsity:g}.",
                "initial_sparsity" if "initial_sparsity" in self.model_fields_set else "final_sparsity",
            )
        return self

    def moments(self) -> Moments:
        return {("begin",): self.begin, ("end",): self.end}

    def numbers(self, steps_per_epoch: int, offset: int) -> dict[str, Any]:
        others = self.model_dump(exclude={"type", "begin", "end"})
        begin, end = (offset + moment.in_steps(steps_per_epoch) for moment in (self.begin, self.end))
        return others | {"begin_step": begin, "end_step": end}


class PolynomialDecaySettings(_Gradual):
    """PolynomialDecay in a recipe."""

    type: Literal["polynomial_decay"]
    power: Annotated[float, Field(gt=0.0, le=1000.0)] = PolynomialDecay.power


class LinearDecaySettings(_Gradual):
    """LinearDecay in a recipe."""

    type: Literal["linear"]


class CosineDecaySettings(_Gradual):
    """CosineDecay in a recipe."""

    type: Literal["cosine"]


class ExponentialDecaySettings(_Gradual):
    """ExponentialDecay in a recipe."""

    type: Literal["exponential"]


class ConstantSettings(_ScheduleSettings):
    """ConstantSparsity in a recipe; without `end`, updates go on for the whole step."""

    type: Literal["constant"]
    target_sparsity: Sparsity
    begin: Duration = START
    end: Duration | None = None
    frequency: Frequency = ConstantSparsity.frequency

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.end is not None and self.begin.after(self.end):
            raise refusal(f"the schedule ends before it begins: begin={self.begin}, end={self.end}.", "end")
        return self

    @property
    def final_sparsity(self) -> float:
        """`target_sparsity`."""
        return self.target_sparsity

    def final_at(self) -> tuple[str | int, ...]:
        return ("target_sparsity",)

    def moments(self) -> Moments:
        moments: Moments = {("begin",): self.begin}
        if self.end is not None:
            moments["end",] = self.end
        return moments

    def numbers(self, steps_per_epoch: int, offset: int) -> dict[str, Any]:
        end = -1 if self.end is None else offset + self.end.in_steps(steps_per_epoch)
        begin = offset + self.begin.in_steps(steps_per_epoch)
        others = {"target_sparsity": self.target_sparsity, "frequency": self.frequency}
        return others | {"begin_step": begin, "end_step": end}


class OneShotSettings(_ScheduleSettings):
    """OneShot in a recipe: one update at `at`, then training goes on under the mask."""

    type: Literal["one_shot"]
    sparsity: Sparsity
    at: Duration = START

    @property
    def final_sparsity(self) -> float:
        """`sparsity`."""
        return self.sparsity

    def final_at(self) -> tuple[str | int, ...]:
        return ("sparsity",)

    def moments(self) -> Moments:
        return {("at",): self.at}

    def numbers(self, steps_per_epoch: int, offset: int) -> dict[str, Any]:
        return {"sparsity": self.sparsity, "step": offset + self.at.in_steps(steps_per_epoch)}


class Stage(Settings):
    """One sparsity of a multi-step schedule and when it holds."""

    example: ClassVar[str] = "{at: {epochs: 2}, sparsity: 0.5}"
    at: Duration
    sparsity: Sparsity


class MultiStepSettings(_ScheduleSettings):
    """MultiStep in a recipe; times and sparsities both rise."""

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
        """The sparsity of the last stage."""
        return self.sparsities[-1].sparsity

    def moments(self) -> Moments:
        return {("sparsities", i, "at"): stage.at for i, stage in enumerate(self.sparsities)}

    def numbers(self, steps_per_epoch: int, offset: int) -> dict[str, Any]:
        pairs = tuple((offset + stage.at.in_steps(steps_per_epoch), stage.sparsity) for stage in self.sparsities)
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
