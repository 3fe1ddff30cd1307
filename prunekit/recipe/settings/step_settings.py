"""Settings of the step kinds as frozen pydantic models. Reads no file and imports neither Keras nor NumPy.

These models reject every mistake that is visible in one step alone; `step_kinds` compares a step with earlier steps.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from prunekit.delivery.reports.rows import INTEGERS, names_integers
from prunekit.recipe.settings.fields import (
    MEMORY,
    Configured,
    Count,
    Epochs,
    Fraction,
    Listed,
    Memory,
    Name,
    Positive,
    Settings,
    Sparsity,
    WeightPattern,
    WeightPatterns,
    name_of,
    refusal,
    registered,
    share,
    shown,
    unit_interval,
)
from prunekit.recipe.settings.timing import Duration, ScheduleSettings
from prunekit.sparsity import shorthands
from prunekit.sparsity.shorthands import (
    ALLOCATIONS,
    CRITERIA,
    POLICIES,
    ChannelAllocation,
    Misfits,
    ParsedPattern,
    Repair,
    sources_of,
)

ExportFormat: TypeAlias = Literal[
    "keras", "litert", "litert-sparse", "litert-float16", "litert-float16-sparse", "litert-dynamic-int8"
]


def _format(value: Any) -> Any:
    if isinstance(value, str) and value not in get_args(ExportFormat) and names_integers(value):
        raise refusal(f"unknown format {shown(value)}. {INTEGERS}")
    return value


# Export steps write all but the last one, which is the format of a quantize step's file.
FileFormat: TypeAlias = Literal[ExportFormat, "litert-integer"]


class GrowingPenalty(Settings):
    """A growing L2 penalty on the channels of the smallest magnitude, as of `pk.penalties.GrowingRegularization`.

    Attributes:
        channels: Share of the channels that is left alone: the `channels` of the later `shrink` step.
        increase: Increase of the penalty.
        frequency: Updates between two increases.
        ceiling: Largest penalty.
        allocation: How the selected channels are shared between the groups.
    """

    channels: Annotated[float, BeforeValidator(share("the share that is left alone, in (0, 1)", closed=False))]
    increase: Positive = 1e-4
    frequency: Count = 10
    ceiling: Positive = 1.0
    allocation: ChannelAllocation = "uniform"


class Train(Settings):
    """A step that trains for a number of epochs and keeps the zeros of earlier prune steps.

    Attributes:
        keep_zeros: True also keeps the model's original zeros, in weights that are pruned by default.
        group_lasso: Strength of a group lasso on channels during the training, as of `pk.penalties.GroupLasso`; None =
            none.
        growing_regularization: Penalty on channels that a later step removes; None = none.
    """

    example: ClassVar[str] = "{epochs: 10}"
    epochs: Epochs
    learning_rate: Positive | None = None
    keep_zeros: bool = True
    group_lasso: Positive | None = None
    growing_regularization: GrowingPenalty | None = None

    @model_validator(mode="after")
    def _one_penalty(self) -> Self:
        if self.group_lasso is not None and self.growing_regularization is not None:
            raise refusal("a training has one penalty on channels. Received: group_lasso and growing_regularization.")
        return self


def parse_pattern(text: str) -> ParsedPattern:
    """Returns the parsed name of a pattern, with its numbers validated.

    Raises:
        ValueError: `text` is not a pattern.

    >>> parse_pattern("block:4x1").numbers
    (4, 1)
    """
    parsed = shorthands.parse_pattern(text)
    if parsed is None:
        raise ValueError(f"unknown pattern {shown(text)}. Valid here: {shorthands.PATTERNS}.")
    if parsed.kind == "nm" and not 0 < parsed.numbers[0] < parsed.numbers[1]:
        raise ValueError(f"N:M keeps n of every m weights, so it needs 0 < n < m. Received: {shown(text)}.")
    if parsed.numbers and min(parsed.numbers) < 1:
        raise ValueError(f"a block has at least one input and one output. Received: {shown(text)}.")
    return parsed


def checked_pattern(value: str) -> str:
    """Returns the name of a pattern unchanged; refuses other texts."""
    try:
        parse_pattern(value)
    except ValueError as error:
        raise refusal(str(error)) from None
    return value


class WeightBounds(Settings):
    """Least and greatest final sparsity of a weight, `min` and `max`; one of them may be left out."""

    example: ClassVar[str] = "{min: 0.2, max: 0.8}"
    min: Sparsity | None = None
    max: Sparsity | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.at_least_one("min", "max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise refusal(f"expected min <= max. Received: {self.min:g} and {self.max:g}.", "max")
        return self


class Prune(Settings):
    """A step of gradual pruning (`epochs` and `schedule`), or one-shot pruning without training (`sparsity` alone)."""

    former: ClassVar[Mapping[str, str]] = {"calibration": "examples"}
    example: ClassVar[str] = "{sparsity: 0.5}"
    gone: ClassVar[Mapping[str, str]] = {"compat": "policy: tfmot", "pooling": "pattern: block:4x1:max"}
    epochs: Epochs | None = None
    schedule: ScheduleSettings | None = None
    sparsity: Sparsity | None = None
    learning_rate: Positive | None = None
    criterion: Annotated[str | Configured, registered(CRITERIA)] = "auto"
    pattern: Annotated[str, AfterValidator(checked_pattern)] = "unstructured"
    allocation: Annotated[str | Configured, registered(ALLOCATIONS)] = "auto"
    policy: Annotated[str | Configured, registered(POLICIES)] = "gradual"
    include: WeightPatterns = ()
    exclude: WeightPatterns = ()
    keep_one: bool = True
    examples: Count | None = None
    repair: Repair | None = None
    memory: Memory = MEMORY
    overrides: dict[WeightPattern, Sparsity] = {}
    bounds: dict[WeightPattern, WeightBounds] = {}
    misfits: Misfits = "error"

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_kind()
        self._check_moments()
        self._check_pattern()
        self._check_examples()
        return self

    def _check_kind(self) -> None:
        self.exactly_one("schedule", "sparsity")
        if self.schedule is not None and self.epochs is None:
            raise refusal(
                "a schedule needs 'epochs' in the same step: add epochs, or prune in one shot with 'sparsity'."
            )
        if self.sparsity is not None and self.epochs is not None:
            raise refusal(
                "'sparsity' prunes in one shot, without training. To prune while training, write "
                f"schedule: {{type: polynomial_decay, final_sparsity: {self.sparsity:g}}}; to train afterwards, leave "
                "'epochs' out and add a finetune step.",
                "epochs",
            )
        if self.epochs is None:
            self.only_with("epochs", "learning_rate")
            if "training" in sources_of(self.needs):
                raise refusal(
                    f"{name_of(self.criterion)!r} measures how training changes the weights: add 'epochs' and a "
                    "'schedule', or choose another criterion.",
                    "criterion",
                )

    def _check_examples(self) -> None:
        if self.repair is not None and not self.one_shot:
            raise refusal("'repair' belongs to one-shot pruning with 'sparsity': training repairs by itself.", "repair")
        if self.memory != MEMORY and not self.one_shot:
            raise refusal(
                "'memory' belongs to one-shot pruning with 'sparsity': a training keeps no activations.", "memory"
            )
        if self.repair is not None and name_of(self.policy) == "tfmot":
            raise refusal("policy: tfmot repairs nothing. Leave 'repair' out.", "repair")
        if self.examples is not None and not (self.is_repairable or "data" in sources_of(self.needs)):
            raise refusal("'examples' needs 'repair', or a criterion or allocation that reads data.", "examples")

    def _check_moments(self) -> None:
        if self.schedule is None:
            return
        for path, moment in self.schedule.moments().items():
            if moment.after(Duration(epochs=float(self.epochs or 0))):
                raise refusal(
                    f"the step trains for {self.epochs} epochs, and this comes after {moment}.", "schedule", *path
                )

    def _check_pattern(self) -> None:
        parsed = parse_pattern(self.pattern)
        if parsed.kind != "nm":
            return
        self._without_limits(f"{self.pattern} gives every weight the same sparsity")
        n, m = parsed.numbers
        if abs(self.final_sparsity - (1 - n / m)) > 1e-6:
            raise refusal(
                f"{self.pattern} keeps {n} of every {m} weights, so its final sparsity is {1 - n / m:.6g}. "
                f"Received: {self.final_sparsity:g}.",
                *self.final_at(),
            )
        if ALLOCATIONS[name_of(self.allocation)].per_weight:
            raise refusal(
                f"{name_of(self.allocation)} gives each weight its own sparsity, and {self.pattern} has one: write "
                "allocation: uniform.",
                "allocation" if "allocation" in self.model_fields_set else "pattern",
            )

    def _without_limits(self, reason: str) -> None:
        for option in ("overrides", "bounds"):
            if getattr(self, option):
                raise refusal(f"{reason}. Leave {option!r} out.", option)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the statistics that criterion, allocation and policy need."""
        rows = CRITERIA[name_of(self.criterion)], ALLOCATIONS[name_of(self.allocation)], POLICIES[name_of(self.policy)]
        return tuple(name for row in rows for name in row.needs)

    @property
    def reads_data(self) -> bool:
        """True if criterion, allocation or policy need data, or the number of examples is given."""
        return self.examples is not None or "data" in sources_of(self.needs)

    @property
    def is_repairable(self) -> bool:
        """True if the step repairs the model, without data on synthetic inputs."""
        return self.one_shot and name_of(self.policy) == "gradual" and self.repair != "none"

    @property
    def one_shot(self) -> bool:
        """True if the step prunes at once, without training."""
        return self.schedule is None

    @property
    def final_sparsity(self) -> float:
        """Final sparsity of the step."""
        return self.schedule.final_sparsity if self.schedule is not None else self.sparsity or 0.0

    def final_at(self) -> tuple[str | int, ...]:
        """Returns the path of the final sparsity inside the step."""
        return ("schedule", *self.schedule.final_at()) if self.schedule is not None else ("sparsity",)


class Export(Settings):
    """A step that writes the current model in each format, under one name."""

    example: ClassVar[str] = "{formats: [keras, litert]}"
    formats: Annotated[tuple[Annotated[ExportFormat, BeforeValidator(_format)], ...], Listed, Field(min_length=1)]
    name: Name = "model"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i, name in enumerate(self.formats):
            if name in self.formats[:i]:
                raise refusal(f"format {name!r} is listed twice.", "formats", i)
        return self


class Range(Settings):
    """Bounds `min` and `max`, fractions; one of them may be left out."""

    example: ClassVar[str] = "{min: 0.9}"
    min: Fraction | None = None
    max: Fraction | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.at_least_one("min", "max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise refusal(f"expected min <= max. Received: {self.min:g} and {self.max:g}.", "max")
        return self


class MetricBound(Settings):
    """Bounds `min` and `max` on a metric; one of them may be left out."""

    example: ClassVar[str] = "{max: 0.3}"
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.at_least_one("min", "max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise refusal(f"expected min <= max. Received: {self.min:g} and {self.max:g}.", "max")
        return self


def _numbers(value: Any) -> Any:
    """Refuses other kinds first: of a union of kinds, the first one would be named as the expected kind."""
    for name, most in value.items() if isinstance(value, Mapping) else ():
        if name != "relative" and not isinstance(most, int | float):
            raise refusal(f"expected the largest drop that is allowed, a number. Received: {shown(most)}.", str(name))
    return value


def _drops(value: dict[str, bool | float]) -> dict[str, bool | float]:
    for name, most in value.items():
        if name == "relative":
            if not isinstance(most, bool):
                raise refusal(f"'relative' is true or false. Received: {shown(most)}.", name)
        elif isinstance(most, bool) or most < 0:
            raise refusal(f"expected the largest drop that is allowed, at least 0. Received: {shown(most)}.", name)
    if not set(value) - {"relative"}:
        raise refusal("expected at least one metric, such as {mae: 0.02}.")
    return value


class ByteBound(Settings):
    """Upper bounds on a file's size in bytes: `max` as written, `gzip_max` compressed with gzip."""

    example: ClassVar[str] = "{max: 100000} or {gzip_max: 20000}"
    max: Count | None = None
    gzip_max: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.at_least_one("max", "gzip_max")


class Expect(Settings):
    """A step that fails the run if a bound is not met.

    Attributes:
        metrics: Bounds on metrics of the current model, or on its loss.
        drop: Metric -> by how much it may be worse than before the first step that prunes or makes the model smaller:
            lower where higher is better, else higher. With `relative: true` as a fraction of the value before.
        sparsity: Bounds on the sparsity over all targets of the prune steps so far.
        bytes: Bounds on the size of an exported file, by name of the format.
    """

    example: ClassVar[str] = "{metrics: {accuracy: {min: 0.96}}, bytes: {litert: {max: 100000}}}"
    gone: ClassVar[Mapping[str, str]] = {
        "accuracy": "metrics: {accuracy: {min: 0.96}}",
        "accuracy_drop": "drop: {accuracy: 0.02}",
    }
    metrics: dict[str, MetricBound] | None = None
    drop: Annotated[dict[str, bool | float], BeforeValidator(_numbers), AfterValidator(_drops)] | None = None
    sparsity: Range | None = None
    bytes: dict[FileFormat, ByteBound] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bytes is not None and not self.bytes:
            raise refusal("expected at least one exported format, such as {litert: {max: 100000}}.", "bytes")
        if self.metrics is not None and not self.metrics:
            raise refusal("expected at least one metric, such as {mae: {max: 0.3}}.", "metrics")
        accuracy = (self.metrics or {}).get("accuracy")
        for side, value in accuracy.model_dump(exclude_none=True).items() if accuracy else ():
            unit_interval(value, True, "metrics", "accuracy", side)
        return self.at_least_one("metrics", "drop", "sparsity", "bytes")

    @property
    def drops(self) -> dict[str, float]:
        """Metric -> largest drop, from `drop`."""
        return {name: float(most) for name, most in (self.drop or {}).items() if name != "relative"}

    @property
    def drops_are_relative(self) -> bool:
        """True if `drop` holds fractions of the values before pruning."""
        return bool((self.drop or {}).get("relative", False))

    @property
    def bounded_metrics(self) -> tuple[str, ...]:
        """Names of the metrics in `metrics` and `drop`."""
        return tuple(dict.fromkeys([*(self.metrics or {}), *self.drops]))
