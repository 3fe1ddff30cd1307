"""Settings of the step kind search. Reads no file and imports neither Keras nor NumPy."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from prunekit.delivery.reports.rows import INTEGER_FORMAT
from prunekit.recipe.settings.fields import Epochs, Memory, Name, Positive, Settings, Words, refusal, shown
from prunekit.recipe.settings.step_base import LEVELS, RANKS, ZEROS, Invariant, StepSettings, epochs_text
from prunekit.sparsity.arguments import MEMORY, number_of_bytes, time_or_share
from prunekit.sparsity.shorthands import SearchProfile, SearchTarget, SearchTechnique


def _bytes(value: Any) -> Any:
    try:
        return None if value is None else int(number_of_bytes("bytes", value))
    except (TypeError, ValueError) as error:
        raise refusal(f"expected bytes, such as 200kB or 200000. Received: {shown(value)}.") from error


def _latency(value: Any) -> Any:
    try:
        if value is not None:
            time_or_share("latency", value)
    except (TypeError, ValueError) as error:
        raise refusal(
            f"expected a time such as 2ms, or a share of the time of the file in float32. Received: {shown(value)}."
        ) from error
    return value


def _all(value: Any) -> Any:
    return () if value == "all" else value


class SearchTraining(Settings):
    """A training of the mixtures of a search.

    Attributes:
        learning_rate: Learning rate; None means that of the recipe's compile settings.
    """

    example: ClassVar[str] = "{epochs: 3}"
    epochs: Epochs
    learning_rate: Positive | None = None


class Search(StepSettings):
    """A step that chooses channels, ranks, bits and zeros together, and writes the integer LiteRT file, as `pk.search`.

    Examples of the validation data choose and judge, and training examples where none are held out.

    Attributes:
        drop: By how much the main metric of the compile settings may become worse; None = the least drop within the
            other bounds.
        bytes: Most bytes of the file.
        latency: Most time of a call on this machine: "2ms", or a share of that of the file in float32.
        arena: Most bytes for activations, as LiteRT for Microcontrollers plans them.
        techniques: What may be chosen; empty = all.
        training: A training of bolder mixtures; None = none.
        memory: Largest number of bytes of activations that are kept.
        name: Stem of the file's name.
    """

    example: ClassVar[str] = "{drop: 0.005}"
    changes_weights: ClassVar[bool] = True
    returns_new_model: ClassVar[bool] = True
    leaves: ClassVar[Invariant | None] = LEVELS
    keeps: ClassVar[frozenset[Invariant]] = frozenset({ZEROS, RANKS})
    drop: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    bytes: Annotated[int | None, BeforeValidator(_bytes)] = None
    latency: Annotated[float | str | None, BeforeValidator(_latency)] = None
    arena: Annotated[int | None, BeforeValidator(_bytes)] = None
    profile: SearchProfile = "small"
    target: SearchTarget = "litert"
    techniques: Annotated[tuple[SearchTechnique, ...], Words, BeforeValidator(_all)] = ()
    training: SearchTraining | None = None
    memory: Memory = MEMORY
    name: Name = "model"

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.at_least_one("drop", "bytes", "latency", "arena")
        if self.drop is None and self.profile != "small":
            raise refusal("profile is what is minimised within a drop: add drop, or leave profile out.", "profile")
        if self.target != "packed" and set(self.techniques) == {"prune"}:
            raise refusal(
                "zeros make packed files alone smaller: add other techniques, or target: packed.", "techniques"
            )
        return self

    @property
    def trains(self) -> bool:
        """True if mixtures are trained."""
        return self.training is not None

    @property
    def reads_data(self) -> bool:
        """True."""
        return True

    def packs(self, name: str) -> bool:
        """Returns True for the integer file of a search for the smallest packed file."""
        return self.target == "packed" and name == INTEGER_FORMAT

    @property
    def written_formats(self) -> tuple[str, ...]:
        """The format of integer files."""
        return (INTEGER_FORMAT,)

    def text(self) -> str:
        """Returns the question."""
        parts = [] if self.drop is None else [f"drop {self.drop:g}"]
        parts += [] if self.bytes is None else [f"{self.bytes:,} bytes"]
        parts += [] if self.latency is None else [f"latency {self.latency}"]
        parts += [] if self.arena is None else [f"arena {self.arena:,} bytes"]
        parts += [self.profile, self.target, " ".join(self.techniques or ("all techniques",))]
        parts += [] if self.training is None else [f"{epochs_text(self.training.epochs)} for each of the bolder files"]
        return ", ".join(parts)
