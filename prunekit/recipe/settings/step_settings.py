"""Settings of the step kinds train, finetune and prune. Reads no file and imports neither Keras nor NumPy."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, model_validator

from prunekit.recipe.settings.distill_settings import Distilled, check_distilled
from prunekit.recipe.settings.fields import (
    Configured,
    Count,
    Epochs,
    Memory,
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
)
from prunekit.recipe.settings.shrink_settings import PER_KIND, Shrink
from prunekit.recipe.settings.step_base import (
    CODEBOOKS,
    RANKS,
    ZEROS,
    Bounds,
    Invariant,
    StepSettings,
    epochs_text,
    patterns_text,
    training_text,
)
from prunekit.recipe.settings.timing import Duration, ScheduleSettings
from prunekit.sparsity import shorthands
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.shorthands import (
    ALLOCATIONS,
    CRITERIA,
    MEASURED,
    POLICIES,
    ChannelAllocation,
    Misfits,
    ParsedPattern,
    Repair,
    sources_of,
)


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
    allocation: Annotated[ChannelAllocation, PER_KIND] = "uniform"


class Train(StepSettings):
    """A step that trains for a number of epochs and keeps the zeros and clusters of earlier steps.

    Attributes:
        keep_zeros: True also keeps the model's original zeros, in weights that are pruned by default.
        group_lasso: Strength of a group lasso on channels during the training, as of `pk.penalties.GroupLasso`; None =
            none.
        growing_regularization: Penalty on channels that a later step removes; None = none.
        distill: What the model learns from a teacher meanwhile; None = nothing.
    """

    example: ClassVar[str] = "{epochs: 10}"
    changes_weights: ClassVar[bool] = True
    only_trains: ClassVar[bool] = True
    keeps: ClassVar[frozenset[Invariant]] = frozenset({ZEROS, RANKS, CODEBOOKS})
    epochs: Epochs
    learning_rate: Positive | None = None
    keep_zeros: bool = True
    group_lasso: Positive | None = None
    growing_regularization: GrowingPenalty | None = None
    distill: Distilled = None

    @model_validator(mode="after")
    def _one_penalty(self) -> Self:
        if self.group_lasso is not None and self.growing_regularization is not None:
            raise refusal("a training has one penalty on channels. Received: group_lasso and growing_regularization.")
        return self

    def text(self) -> str:
        """Returns epochs, learning rate and penalties."""
        rate = "" if self.learning_rate is None else f", learning rate {self.learning_rate:g}"
        zeros = "" if self.keep_zeros else ", zeros that the model came with may grow back"
        penalty = "" if self.group_lasso is None else f", group lasso {self.group_lasso:g}"
        if self.growing_regularization is not None:
            penalty = f", growing regularization of all but {self.growing_regularization.channels:g} of the channels"
        taught = "" if self.distill is None else f", {self.distill.text()}"
        return f"{epochs_text(self.epochs)}{rate}{penalty}{zeros}{taught}"

    def check(self, earlier: Sequence[Any]) -> None:
        """Refuses weights on grids, and a teacher that does not exist."""
        super().check(earlier)
        check_distilled(self, earlier)

    @property
    def trains(self) -> bool:
        """True."""
        return True


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


class Prune(StepSettings):
    """A step of gradual pruning (`epochs` and `schedule`), or one-shot pruning without training (`sparsity` alone)."""

    former: ClassVar[Mapping[str, str]] = {"calibration": "examples"}
    example: ClassVar[str] = "{sparsity: 0.5}"
    changes_weights: ClassVar[bool] = True
    leaves: ClassVar[Invariant | None] = ZEROS
    gone: ClassVar[Mapping[str, str]] = {"compat": "policy: tfmot", "pooling": "pattern: block:4x1:max"}
    epochs: Epochs | None = None
    schedule: ScheduleSettings | None = None
    sparsity: Sparsity | None = None
    learning_rate: Positive | None = None
    distill: Distilled = None
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
    bounds: dict[WeightPattern, Bounds[Sparsity]] = {}
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

    @property
    def trains(self) -> bool:
        """True unless the step prunes at once."""
        return not self.one_shot

    def text(self) -> str:
        """Returns sparsity, schedule, method and weights."""
        if self.schedule is None:
            parts = [f"to {self.final_sparsity:g} at once"]
        else:
            moments = [f"{path[-1]} {moment}" for path, moment in self.schedule.moments().items()]
            parts = [f"{self.epochs} epochs", f"{self.schedule.type} to {self.final_sparsity:g}", *moments]
        parts += training_text(self)
        parts += [str(self.criterion), self.pattern, str(self.allocation)]
        if self.policy != "gradual":
            parts.append(f"policy {self.policy}")
        return ", ".join(parts + weights_text(self))

    def check(self, earlier: Sequence[Any]) -> None:
        """Refuses weights on grids, sparsities below earlier ones, and N:M patterns after shrink steps that misfit."""
        super().check(earlier)
        check_distilled(self, earlier)
        self._check_widths(earlier)
        for before in reversed(earlier):
            # Compare only steps with equal include and exclude: without the model the targets are not known.
            if before.prunes and (before.include, before.exclude) == (self.include, self.exclude):
                if self.final_sparsity < before.final_sparsity:
                    raise refusal(
                        "pruned weights do not come back: an earlier step already prunes the same weights to "
                        f"{before.final_sparsity:g}. Received: {self.final_sparsity:g}.",
                        *self.final_at(),
                    )
                return

    def _check_widths(self, earlier: Sequence[Any]) -> None:
        """Refuses an N:M pattern that may not fit the layers that an earlier shrink step leaves."""
        parsed = parse_pattern(self.pattern)
        if parsed.kind != "nm" or self.misfits == "skip":
            return
        group = parsed.numbers[1]
        for before in earlier:
            if isinstance(before, Shrink) and not before.plans_widths and before.multiple % group:
                if before.nonzero:
                    cause = "channels: nonzero"
                elif before.measure in MEASURED:
                    cause = f"a target in {before.measure}"
                else:
                    cause = f"allocation: {before.allocation}"
                raise refusal(
                    f"{self.pattern} needs input axes whose lengths are multiples of {group}, and with {cause} "
                    f"the earlier shrink step may leave any number of channels. Write multiple: "
                    f"{group} in the shrink step, or misfits: skip here.",
                    "pattern",
                )


def weights_text(step: Any) -> list[str]:
    """Returns which weights a step prunes, and how much of single weights, as parts of its text."""
    texts = patterns_text(step)
    texts += [f"{pattern} to {share:g}" for pattern, share in step.overrides.items()]
    for pattern, bounds in step.bounds.items():
        given = bounds.model_dump(exclude_none=True)
        texts.append(f"{pattern} at " + " and ".join(f"{side}. {value:g}" for side, value in given.items()))
    return texts
