"""Settings of the step kind quantize. Reads no file and imports neither Keras nor NumPy."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from prunekit.delivery.reports.rows import INTEGER_FORMAT
from prunekit.recipe.settings.distill_settings import Distilled, check_distilled
from prunekit.recipe.settings.fields import (
    EXAMPLES,
    Count,
    Epochs,
    Memory,
    Name,
    Positive,
    Sparsity,
    WeightPattern,
    WeightPatterns,
    Words,
    refusal,
    shown,
)
from prunekit.recipe.settings.step_base import (
    CODEBOOKS,
    GRIDS,
    RANKS,
    ZEROS,
    Invariant,
    StepSettings,
    epochs_text,
    patterns_text,
    training_text,
)
from prunekit.recipe.settings.step_settings import checked_pattern
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.shorthands import ActivationBits, Misfits, Rounding

# Settings with which equal weights of a channel may become different.
_UNEQUAL = ("budget", "drop", "group_size", "method", "equalize", "rate", "sparsity")
_UNEQUAL_IN_TRAINING = ("group_size",)
# Ends of the names of the files, by the activations.
_ENDINGS = {8: "", 16: "-activations16", "float": "-weights"}
_RULE = re.compile(r"minmax|mse|percentile(:0?\.\d+)?")


def _activation_bits(value: Any) -> Any:
    if value in (8, 16, "float"):
        return value
    raise refusal(f"expected 8 or 16 bits, or float for tensors in floating point. Received: {shown(value)}.")


def _bits(value: Any) -> Any:
    if value is None or _are_bits(value):
        return value
    if isinstance(value, list | tuple) and value and all(map(_are_bits, value)) and len(set(value)) == len(value):
        return tuple(sorted(value))
    if isinstance(value, dict) and value and all(_are_bits(bits) or bits == "float" for bits in value.values()):
        return value
    raise refusal(
        "expected bits, 2 to 8; a list of bits to choose from, with budget or drop; or bits by patterns of layers, "
        f"such as {{head: 8, 'block_*': 4}}, with float for floating point. Received: {shown(value)}."
    )


def _kind(value: Any) -> str:
    """Returns which of the forms of `bits` a value has; the tags are no keys of a recipe."""
    return "(patterns)" if isinstance(value, dict) else "(list)" if isinstance(value, list | tuple) else "(bits)"


def _are_bits(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 2 <= value <= 8


def _rule(value: Any) -> Any:
    if value is None or (isinstance(value, str) and _RULE.fullmatch(value)):
        return value
    raise refusal(f"expected minmax, mse or percentile:0.9999. Received: {shown(value)}.")


Bits = Annotated[
    Annotated[int | None, Tag("(bits)")]
    | Annotated[tuple[int, ...], Tag("(list)")]
    | Annotated[dict[WeightPattern, int | str], Tag("(patterns)")],
    Discriminator(_kind),
]
IntegerIO = Annotated[tuple[Literal["inputs", "outputs", "uint8"], ...], Words]
RangeRule = Annotated[str, BeforeValidator(_rule)]


class Quantize(StepSettings):
    """A step that puts weights on integer grids, and writes the integer LiteRT file.

    Without `epochs` it quantizes after training, as `pk.quantize`; with them it trains on integers, as a
    `QuantizationCallback`. Bits for a budget or drop are chosen before that training, as `pk.choose_bits`. Fields
    that are not listed here are options of `pk.quantize`.

    Attributes:
        epochs: Epochs of training on integers; None = no training.
        learning_rate: Learning rate of this training; None means that of the recipe's compile settings.
        begin_epoch: Number of epochs in floating point before it; the step trains `epochs` epochs in all.
        distill: What the model learns from a teacher in this training; None = nothing.
        bits: Bits of the weights, 2 to 8; bits to choose from; or bits by patterns, with "float". None = 8, or 4 and
            8 to choose from.
        budget: Largest number of bytes of all weights, for which bits are chosen; None = none.
        drop: Largest loss of the main metric on the validation data, for which bits are chosen; None = none.
        sparse: Whether kernels of the file are encoded sparsely where that is smaller.
        integer_io: What of the file's "inputs" and "outputs" is integers instead of float32; with "uint8" without a
            sign, and "uint8" alone means both.
        examples: Number of training examples that are read.
        memory: Largest number of bytes of activations that are kept while weights are rounded or measured on data.
        name: Stem of the file's name.
    """

    example: ClassVar[str] = "{bits: 8, activation_bits: 8}"
    former: ClassVar[Mapping[str, str]] = {
        "weights": "bits",
        "activations": "activation_bits",
        "calibration": "examples",
    }
    changes_weights: ClassVar[bool] = True
    leaves: ClassVar[Invariant | None] = GRIDS
    keeps: ClassVar[frozenset[Invariant]] = frozenset({ZEROS, RANKS, CODEBOOKS})
    epochs: Epochs | None = None
    learning_rate: Positive | None = None
    begin_epoch: Annotated[int, Field(ge=0)] = 0
    distill: Distilled = None
    bits: Annotated[Bits, BeforeValidator(_bits)] = None
    budget: Count | None = None
    drop: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    activation_bits: Annotated[ActivationBits, BeforeValidator(_activation_bits)] = 8
    group_size: Count | None = None
    method: Rounding = "auto"
    weight_ranges: RangeRule | None = None
    activation_ranges: RangeRule = "mse"
    correct_biases: bool | None = None
    equalize: bool = False
    rate: Annotated[float, Field(ge=0, lt=100, allow_inf_nan=False)] = 0.0
    sparsity: Sparsity | None = None
    pattern: Annotated[str, AfterValidator(checked_pattern)] = "unstructured"
    sparse: bool = False
    integer_io: IntegerIO = ()
    examples: Count = EXAMPLES
    memory: Memory = MEMORY
    include: WeightPatterns = ()
    exclude: WeightPatterns = ()
    misfits: Misfits = "skip"
    full_integer: bool = False
    name: Name = "model"

    @model_validator(mode="after")
    def _of_training(self) -> Self:
        if self.epochs is None:
            for name in ("learning_rate", "begin_epoch"):
                if self._is_given(name):
                    raise refusal(f"{name} is about a training on integers: write epochs, too.", name)
            return self
        for name in ("method", "correct_biases", "equalize", "sparsity", "pattern"):
            if self._is_given(name):
                raise refusal(f"{name} is about rounding without training. Remove it, or remove epochs.", name)
        if self._is_given("memory") and not self.candidates:
            raise refusal("memory is about weights that are rounded or measured on data. Remove it.", "memory")
        if self.begin_epoch >= self.epochs:
            raise refusal(
                f"the training on integers begins before the last epoch. Received: begin_epoch {self.begin_epoch} "
                f"and epochs {self.epochs}.",
                "begin_epoch",
            )
        return self

    @model_validator(mode="after")
    def _of_zeros(self) -> Self:
        if self.pattern != "unstructured" and self.sparsity is None:
            raise refusal(
                f"pattern is that of new zeros: write sparsity, too. Received: {shown(self.pattern)}.", "pattern"
            )
        return self

    @model_validator(mode="after")
    def _of_groups(self) -> Self:
        if self.group_size is not None and self.activation_bits != "float":
            raise refusal(
                "no integer kernel of LiteRT reads scales of groups: write activation_bits: float, too. Received: "
                f"group_size {self.group_size} and activation_bits {self.activation_bits}.",
                "group_size",
            )
        return self

    @model_validator(mode="after")
    def _of_integers(self) -> Self:
        if self.integer_io and self.activation_bits == "float":
            raise refusal("a file with activation_bits: float has inputs and outputs in floating point.", "integer_io")
        if self.full_integer and self.activation_bits == "float":
            raise refusal(
                "with full_integer nothing computes in floating point: write activation_bits: 8.", "full_integer"
            )
        if self.full_integer and self.drop is not None:
            raise refusal("for a drop weights may stay in floating point: write a budget, or no full_integer.", "drop")
        if "uint8" in self.integer_io and self.activation_bits == 16:
            raise refusal("inputs and outputs of uint8 are those of files with activation_bits: 8.", "integer_io")
        if self.sparse and self.activation_bits == "float":
            raise refusal(
                "sparse is about kernels of integer operations. Remove it, or activation_bits: float.", "sparse"
            )
        return self

    @model_validator(mode="after")
    def _of_choice(self) -> Self:
        bounds = [name for name in ("budget", "drop") if getattr(self, name) is not None]
        listed = isinstance(self.bits, tuple)
        if len(bounds) > 1 or (listed and not bounds):
            raise refusal(
                "bits are chosen for a budget of bytes, or for a drop of the main metric. Received: "
                f"{' and '.join(bounds) or 'bits ' + shown(list(self.bits)) + ' alone'}.",  # type: ignore[arg-type]
                "bits",
            )
        if bounds and not listed and self.bits is not None:
            raise refusal(
                f"{bounds[0]} chooses the bits: write a list, such as [4, 8]. Received: {shown(self.bits)}.",
                "bits",
            )
        return self

    @property
    def candidates(self) -> tuple[int, ...]:
        """Numbers of bits among which are chosen for each weight; () where none are chosen."""
        if self.budget is None and self.drop is None:
            return ()
        return self.bits if isinstance(self.bits, tuple) else (4, 8)

    @property
    def fewest_bits(self) -> int | dict[str, int | str]:
        """Bits of the weights, or by patterns; the fewest of the candidates."""
        if self.candidates:
            return min(self.candidates)
        return self.bits if isinstance(self.bits, int | dict) else 8

    def check(self, earlier: Sequence[Any]) -> None:
        """Refuses weights on grids, and weights of few values where rounding makes equal ones different."""
        super().check(earlier)
        check_distilled(self, earlier)
        given = self.fewest_bits
        bits = [one for one in (given.values() if isinstance(given, dict) else [given]) if one != "float"]
        if self.trains:
            changed = [name for name in _UNEQUAL_IN_TRAINING if self._is_given(name)]
        else:
            changed = [*filter(self._is_given, _UNEQUAL)] or (["bits"] if any(one != 8 for one in bits) else [])
        if changed and any(step.leaves == CODEBOOKS for step in earlier):
            remedy = "" if self.trains else " After it, 8 bits take the nearest steps, and other bits need epochs."
            raise refusal(
                f"{changed[0]!r} makes weights different that an earlier cluster step made equal.{remedy} Leave it "
                "out.",
                changed[0],
            )

    @property
    def bits_text(self) -> str:
        """Bits of the weights, in words."""
        if self.candidates:
            bound = f"at most {self.budget:,} bytes" if self.drop is None else f"a drop of at most {self.drop:g}"
            return f"weights of {' or '.join(map(str, self.candidates))} bits for {bound}"
        bits = self.fewest_bits
        if isinstance(bits, int):
            return f"{bits}-bit weights"
        told = [f"{pattern!r} {f'{number} bits' if number != 'float' else number}" for pattern, number in bits.items()]
        return f"weights by patterns ({', '.join(told)})"

    def _is_given(self, name: str) -> bool:
        # Not `model_fields_set`: the recipe that a run locks has every setting.
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def file(self) -> str:
        """Name of the written file."""
        bits = "mixed" if self.candidates or isinstance(self.fewest_bits, dict) else f"int{self.fewest_bits}"
        return f"{self.name}-{bits}{_ENDINGS[self.activation_bits]}.tflite"

    @property
    def trains(self) -> bool:
        """True if the step trains on integers."""
        return self.epochs is not None

    @property
    def reads_data(self) -> bool:
        """True."""
        return True

    @property
    def written_formats(self) -> tuple[str, ...]:
        """The format of integer files."""
        return (INTEGER_FORMAT,)

    def text(self) -> str:
        """Returns bits, method or training, layers and file."""
        activations = "float" if self.activation_bits == "float" else f"{self.activation_bits}-bit"
        zeros = "" if self.sparsity is None else f" with {self.sparsity:g} zeros ({self.pattern})"
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        parts = [f"{self.bits_text}{groups}{zeros}, {activations} activations"]
        if self.epochs is None:
            parts += [f"method {self.method}", *(["equalized"] if self.equalize else [])]
        else:
            parts.append(epochs_text(self.epochs))
            parts += [f"on integers after {self.begin_epoch}"] if self.begin_epoch else []
            parts += training_text(self)
        parts += [f"rate {self.rate:g}"] if self.rate else []
        parts += ["full integer"] if self.full_integer else []
        return ", ".join([*parts, *patterns_text(self), f"as {self.file!r}"])
