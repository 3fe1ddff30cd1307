"""Settings of the step kind factorize. Reads no file and imports neither Keras nor NumPy."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Discriminator, Tag, model_validator

from prunekit.recipe.settings.fields import (
    EXAMPLES,
    Count,
    Memory,
    WeightPattern,
    WeightPatterns,
    refusal,
    share,
    shown,
)
from prunekit.recipe.settings.shrink_settings import Share
from prunekit.recipe.settings.step_base import RANKS, Invariant, StepSettings, patterns_text
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.shorthands import TARGETS, LowRankForm


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _rank(value: Any) -> Any:
    if value is None or _is_rank(value):
        return value
    if isinstance(value, dict) and value and all(_is_rank(one) or one == "full" for one in value.values()):
        return value
    raise refusal(
        "expected the number of values between the two layers, or ranks by patterns of layers, such as {head: 16, "
        f"'block_*': full}}. Received: {shown(value)}."
    )


Rank = Annotated[
    Annotated[int | None, Tag("(rank)")] | Annotated[dict[WeightPattern, int | str], Tag("(patterns)")],
    Discriminator(lambda value: "(patterns)" if isinstance(value, dict) else "(rank)"),
]
Energy = Annotated[
    float, BeforeValidator(share("the share of the squared outputs that is kept, in (0, 1)", closed=False))
]


class Factorize(StepSettings):
    """A step that replaces layers by several of low rank, as `pk.factorize`.

    Attributes:
        parameters: Share of the parameters that is left after the step.
        macs: Share of the multiply-accumulates that is left.
        bytes: Share of the bytes of the exported LiteRT file (float32) that is left.
        latency: Share of the file's latency on this machine that is left.
        rank: Number of values between the two layers, or ranks by patterns.
        energy: Share of the squared outputs of each layer that is kept. Exactly one of the six is given.
        form: Form of the convolutions: auto, channels, separable or tucker.
        examples: Number of training examples that factors are fitted on.
    """

    example: ClassVar[str] = "{parameters: 0.5}"
    changes_weights: ClassVar[bool] = True
    leaves: ClassVar[Invariant | None] = RANKS
    # The factors of a pruned weight are dense.
    keeps: ClassVar[frozenset[Invariant]] = frozenset({RANKS})
    returns_new_model: ClassVar[bool] = True
    parameters: Share | None = None
    macs: Share | None = None
    bytes: Share | None = None
    latency: Share | None = None
    rank: Annotated[Rank, BeforeValidator(_rank)] = None
    energy: Energy | None = None
    form: LowRankForm = "auto"
    correct_biases: bool = True
    include: WeightPatterns = ()
    exclude: WeightPatterns = ()
    examples: Count = EXAMPLES
    memory: Memory = MEMORY

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.exactly_one(*TARGETS)
        return self

    @property
    def target(self) -> tuple[str, Any]:
        """Name and value of the target."""
        (name,) = self.given(*TARGETS)
        return name, getattr(self, name)

    def text(self) -> str:
        """Returns target and layers."""
        name, value = self.target
        if isinstance(value, dict):
            value = ", ".join(f"{pattern} {rank}" for pattern, rank in value.items())
        form = [] if self.form == "auto" else [self.form]
        return ", ".join([f"{name} {value}", *form, *patterns_text(self)])
