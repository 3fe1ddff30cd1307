"""Options of quantization after training, shared by `pk.quantize`, the recipe step and the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, cast, get_args

from prunekit.sparsity.arguments import whole
from prunekit.sparsity.patterns import Pattern, get_pattern
from prunekit.sparsity.reconstruction import DAMPING
from prunekit.sparsity.shorthands import ActivationBits, Misfits, PatternName, Ranges, Rounding
from prunekit.suggestions import did_you_mean
from prunekit.techniques.quantize.grids.grids import IntegerFormat
from prunekit.techniques.quantize.grids.ranges import MeanSquaredError, MinMax, Percentile, RangeRule

FLOAT = "float"
# Former names of options, for messages.
FORMER = {"weights": "bits", "activations": "activation_bits", "candidates": "bits"}
# Bits of all weights, or by patterns.
Bits = int | Mapping[str, int | Literal["float"]]
METHODS = get_args(Rounding)
RangeName = Ranges | str
RULES = get_args(Ranges)
# Scales of 32 bits for fewer inputs would be more than two bits for each weight.
SMALLEST_GROUP = 16


class _SharedKeywords(TypedDict, total=False):
    activation_bits: ActivationBits
    group_size: int | None
    weight_ranges: RangeName | RangeRule | None
    activation_ranges: RangeName | RangeRule
    include: Sequence[str] | str
    exclude: Sequence[str] | str
    misfits: Misfits
    full_integer: bool


class TrainingKeywords(_SharedKeywords, total=False):
    """Types of the keyword options of `pk.QuantizationCallback` and `pk.Quantizer`; see `QuantizationOptions`."""

    bits: Bits


class RoundingKeywords(_SharedKeywords, total=False):
    """Types of the keyword options of `pk.choose_bits`; see `QuantizationOptions`."""

    method: Rounding
    correct_biases: bool | None
    equalize: bool
    damping: float
    rate: float
    sparsity: float | None
    pattern: PatternName | Pattern


class QuantizationKeywords(TrainingKeywords, RoundingKeywords, total=False):
    """Types of the keyword options of `pk.quantize`; see `QuantizationOptions`."""


@dataclass(frozen=True)
class QuantizationOptions:
    """What becomes integers, and how the integers are chosen.

    Args:
        bits: Bits of the weights, 2 to 8; a LiteRT file stores 2 and 3 bits as 4, so that these pay only where it is
            compressed. Each output channel has a scale, and the zero point is 0. Or bits by
            patterns of layers and weights, {"head": 8, "block_*": 4}, with "float" for layers in floating point; a
            weight that no pattern matches has 8.
        activation_bits: Bits of the tensors between layers: 8 (with a zero point), 16 (without), or "float" to leave
            them in floating point.
        group_size: So many consecutive inputs of each output have a scale of their own, 16 or more, such as 32 or 128;
            the last group may be shorter. Inputs of a convolution are the channels at the first position of its window,
            then those at the second, and so on; in a table, consecutive entries of a row. A weight with no more inputs
            than a group has one scale for each output. No integer kernel reads such scales: activation_bits="float"
            only.
            None: one scale for each output.
        method: "nearest": each weight becomes the nearest value of its grid. "gptq": weights are rounded one input
            after another, and those that are not rounded yet make up for the error; reads data. "awq": channels with
            large activations are scaled, where the layers around them allow it, so that the nearest values keep the
            outputs; reads data. "auto": "gptq" for fewer than 8 bits, or with `sparsity` or `rate`; else "nearest".
            Without data, "auto" reads synthetic inputs, or takes "nearest" where none can be made.
        weight_ranges: How the range of each output channel is chosen: "minmax"; "mse", the smallest mean squared error;
            "percentile:SHARE"; or a `RangeRule`. None = "minmax" for 8 bits, "mse" for fewer.
        activation_ranges: Likewise for tensors between layers.
        correct_biases: True: biases make up for the mean error of each layer's outputs, and the moving statistics of
            batch normalizations follow their inputs; reads data. None = True where the method is "gptq".
        equalize: True: before they are rounded, the weights that compute a channel and those that read it are given
            the same range (cross-layer equalization), which leaves the model's outputs as they are.
        damping: "gptq": fraction of the mean diagonal of the Hessian that is added to its diagonal.
        rate: "gptq": price of a bit, for files that are entropy-coded (gzip): 0.1 or 0.2 for example. A
            weight takes a code that is not the nearest one, most often 0, where the code is shorter by n bits and the
            error of the layer's outputs grows by less than n * rate times that of one step of the grid; above 0.2 the
            steps become longer, too. 0 = the nearest codes.
        sparsity: Fraction of the entries of all kernels and tables together that are zero at the end, in [0, 1): the
            model is pruned before it is rounded, as `pk.prune(model, sparsity, data)` does; entries that are zero
            count. None: entries that are zero stay so, and no others are chosen.
        pattern: Pattern of these zeros, as in `pk.prune`: "unstructured", "2:4", a `Pattern`. Kernels that it does not
            fit are not pruned, with a note.
        include: Names, globs or `re:` patterns of layers and weights to quantize; empty = all.
        exclude: Patterns of layers that compute in floating point; overrides `include`.
        misfits: Layers, operations and weights without integers, and not by your own patterns: "skip" leaves them in
            floating point, and the report names them; "error" refuses the model.
        full_integer: True: nothing computes in floating point, for processors that cannot. Layer, RMS and group
            normalizations and the products and softmax of attention become plain operations with integer kernels, each
            result on a grid of its own. So do recurrent layers for sequences of a known length: an LSTM as one
            operation with a cell state of 16 bits, others step by step. What has no integers even so is refused,
            whatever `misfits` says.

    Raises:
        ValueError: An option has a value that is not listed here.
        TypeError: An option is of another type.
    """

    bits: Bits = 8
    activation_bits: ActivationBits = 8
    group_size: int | None = None
    method: Rounding = "auto"
    weight_ranges: str | RangeRule | None = None
    activation_ranges: str | RangeRule = "mse"
    correct_biases: bool | None = None
    equalize: bool = False
    damping: float = DAMPING
    rate: float = 0.0
    sparsity: float | None = None
    pattern: str | Pattern = "unstructured"
    include: Sequence[str] | str = ()
    exclude: Sequence[str] | str = ()
    misfits: Misfits = "skip"
    full_integer: bool = False

    def __post_init__(self) -> None:
        if self.misfits not in ("skip", "error"):
            raise ValueError(f'`misfits` is "skip" or "error". Received: {self.misfits!r}.')
        if isinstance(self.bits, Mapping):
            _check_patterns(self.bits)
            object.__setattr__(self, "bits", dict(self.bits))
        else:
            _check_bits(self.bits, "`bits`", ", or bits by patterns, {'head': 8, 'block_*': 'float'}")
            object.__setattr__(self, "bits", int(self.bits))
        known = isinstance(self.activation_bits, Integral) and not isinstance(self.activation_bits, bool)
        if self.activation_bits != FLOAT and not (known and self.activation_bits in (8, 16)):
            raise ValueError(
                '`activation_bits` is the number of bits of the tensors between layers, 8 or 16, or "float" to leave '
                f"them in floating point. Received: {self.activation_bits!r}."
            )
        if self.activation_bits != FLOAT:
            object.__setattr__(self, "activation_bits", int(self.activation_bits))
        self._check_groups()
        self._check_full_integer()
        if self.method not in METHODS:
            raise ValueError(
                f"`method` is one of {', '.join(METHODS)}. Received: {self.method!r}."
                f"{did_you_mean(str(self.method), METHODS)}"
            )
        if not (self.correct_biases is None or isinstance(self.correct_biases, bool)):
            raise ValueError(f"`correct_biases` is True, False or None. Received: {self.correct_biases!r}.")
        if not isinstance(self.equalize, bool):
            raise ValueError(f"`equalize` is True or False. Received: {self.equalize!r}.")
        self._check_rounding()
        self._check_pruning()
        if self.weight_ranges is not None:
            object.__setattr__(self, "weight_ranges", as_range_rule(self.weight_ranges, "weight_ranges"))
        object.__setattr__(self, "activation_ranges", as_range_rule(self.activation_ranges, "activation_ranges"))

    def _check_rounding(self) -> None:
        _check_share("damping", self.damping, "a fraction of the mean diagonal")
        price_of_bits(self.rate)
        if self.rate and self.method not in ("auto", "gptq"):
            raise ValueError(
                f'A price of bits is one of method="gptq". Received: rate={self.rate!r} and method={self.method!r}.'
            )

    def _check_groups(self) -> None:
        if self.group_size is None:
            return
        if whole("group_size", self.group_size) < SMALLEST_GROUP:
            raise ValueError(
                f"`group_size` is the number of inputs that share a scale, {SMALLEST_GROUP} or more: for fewer, scales "
                f"take more bytes than few bits save. Received: {self.group_size!r}."
            )
        if self.activation_bits != FLOAT:
            raise ValueError(
                "No integer kernel of LiteRT reads a scale for each group of inputs. Received: "
                f"group_size={self.group_size} and activation_bits={self.activation_bits}. Pass "
                'activation_bits="float", with which files convert the weights to floating point, or leave group_size '
                "out."
            )

    def _check_full_integer(self) -> None:
        if not isinstance(self.full_integer, bool):
            raise ValueError(f"`full_integer` is True or False. Received: {self.full_integer!r}.")
        if self.full_integer and self.activation_bits == FLOAT:
            raise ValueError(
                'With full_integer=True nothing computes in floating point. Received: activation_bits="float". Pass '
                "activation_bits=8, or leave full_integer out."
            )

    def _check_pruning(self) -> None:
        get_pattern(self.pattern)
        if self.sparsity is None:
            if self.pattern != "unstructured":
                raise ValueError(f"`pattern` is that of new zeros: pass `sparsity`, too. Received: {self.pattern!r}.")
            return
        known = isinstance(self.sparsity, Real) and not isinstance(self.sparsity, bool)
        if not known or not 0 <= self.sparsity < 1:
            raise ValueError(
                f"`sparsity` is a fraction of the weights, in [0, 1), or None. Received: {self.sparsity!r}."
            )

    @property
    def patterns(self) -> Mapping[str, int | None]:
        """Bits by patterns of layers and weights, None = floating point; other weights have `default_bits`."""
        given = self.bits if isinstance(self.bits, Mapping) else {}
        return {pattern: None if bits == FLOAT else cast("int", bits) for pattern, bits in given.items()}

    @property
    def default_bits(self) -> int:
        """Bits of the weights that no pattern matches."""
        return 8 if isinstance(self.bits, Mapping) else self.bits

    def weight_rule(self, bits: int) -> RangeRule:
        """Chooses the range of each output channel of a weight with so many bits."""
        if self.weight_ranges is None:
            return MinMax() if bits == 8 else MeanSquaredError()
        return cast("RangeRule", self.weight_ranges)

    @property
    def activation_rule(self) -> RangeRule:
        """Chooses the range of each tensor between layers."""
        return cast("RangeRule", self.activation_ranges)

    @property
    def activation_width(self) -> int | None:
        """Bits of the tensors between layers; None if these stay in floating point."""
        return None if self.activation_bits == FLOAT else cast("int", self.activation_bits)

    @property
    def activation_format(self) -> IntegerFormat | None:
        """The codes of the tensors between layers; None if these stay in floating point."""
        bits = self.activation_width
        return None if bits is None else IntegerFormat(bits, symmetric=bits == 16)

    @property
    def _reads_rows(self) -> bool:
        """Whether "auto" rounds by GPTQ where there are data."""
        return self.rate > 0 or min([self.default_bits, *filter(None, self.patterns.values())]) < 8

    @property
    def may_stand_in(self) -> bool:
        """True if weights alone are rounded by GPTQ, so that without data synthetic inputs are read."""
        weights_alone = self.activation_bits == FLOAT and self.sparsity is None
        return weights_alone and self.method == "auto" and self._reads_rows

    def with_data(self, data: Any) -> tuple[str, bool]:
        """Returns (method, whether biases are corrected) for these calibration data.

        Raises:
            ValueError: There are no data, and an option needs some.
        """
        method = self.method
        if method == "auto":
            reads = data is not None and self._reads_rows
            method = "gptq" if reads or self.sparsity is not None else "nearest"
        corrects = method == "gptq" if self.correct_biases is None else self.correct_biases
        needed = [
            text
            for needs, text in (
                (self.activation_bits != FLOAT, f"activation_bits={self.activation_bits}"),
                (self.sparsity is not None, f"sparsity={self.sparsity}"),
                (self.rate > 0 and not self.may_stand_in, f"rate={self.rate}"),
                (method in ("gptq", "awq"), f"method={method!r}"),
                (corrects, "correct_biases=True"),
            )
            if needs
        ]
        if data is None and needed:
            raise ValueError(
                f"Quantization with {' and '.join(needed)} reads calibration data. Received: data=None. Pass some "
                "hundred examples of the training data as `data`, or quantize the weights alone with "
                'activation_bits="float".'
            )
        return method, corrects


def price_of_bits(rate: Any) -> float:
    """Returns a price of bits.

    Raises:
        ValueError: It is not a number in [0, 100).
    """
    _check_share("rate", rate, "the price of a bit, such as 0.1")
    return float(rate)


def _check_share(name: str, value: Any, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 100:
        raise ValueError(f"`{name}` is {meaning}, in [0, 100). Received: {value!r}.")


def _check_patterns(given: Mapping[Any, Any]) -> None:
    if not given or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(
            f"`bits` by patterns names layers or weights with their bits, {{'head': 8}}. Received: {given!r}."
        )
    for pattern, bits in given.items():
        if bits != FLOAT:
            _check_bits(bits, f"`bits[{pattern!r}]`", ', or "float"')


def _check_bits(bits: Any, name: str, patterns: str = "") -> None:
    known = isinstance(bits, Integral) and not isinstance(bits, bool)
    if not known or not 2 <= bits <= 8:
        raise (ValueError if known else TypeError)(
            f"{name} is the number of bits of a weight, an int from 2 to 8{patterns}. Received: {bits!r}."
        )


def as_range_rule(given: str | RangeRule, option: str) -> RangeRule:
    """Returns the rule of a shorthand: "minmax", "mse" or "percentile:SHARE"; other rules as they are.

    Raises:
        ValueError: The text is no shorthand.
        TypeError: `given` is neither a text nor a rule.
    """
    if isinstance(given, type):
        raise TypeError(f"`{option}` is a rule, not its class. Received: {given.__name__}. Pass {given.__name__}().")
    if not isinstance(given, str):
        if callable(given):
            return given
        raise TypeError(f"`{option}` is one of {', '.join(RULES)}, or a RangeRule. Received: {given!r}.")
    kind, _, share = given.partition(":")
    if given == "minmax":
        return MinMax()
    if given == "mse":
        return MeanSquaredError()
    if kind == "percentile":
        try:
            return Percentile(float(share)) if share else Percentile()
        except ValueError as error:
            raise ValueError(
                f'`{option}`: write "percentile:0.9999", with the share of values inside. Received: {given!r}.'
            ) from error
    raise ValueError(f"`{option}` is one of {', '.join(RULES)}. Received: {given!r}.{did_you_mean(given, RULES)}")


def rule_name(rule: Any) -> str:
    """Returns the shorthand of a rule of ranges; the name of its type for a rule of your own."""
    if isinstance(rule, Percentile):
        return f"percentile:{rule.share:g}"
    return {MinMax: "minmax", MeanSquaredError: "mse"}.get(type(rule), type(rule).__name__)
