"""Settings of the step kind quantize. Reads no file and imports neither Keras nor NumPy."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from prunekit.recipe.fields import Count, Name, Settings, WeightPatterns, refusal, shown

# Format of the files that the step writes, in reports and in the bounds of `expect`.
INTEGER_FORMAT = "litert-integer"
_RULE = re.compile(r"minmax|mse|percentile(:0?\.\d+)?")


def _activations(value: Any) -> Any:
    if value == 8 and not isinstance(value, bool):
        return value
    if value == "float":
        return value
    raise refusal(f"expected 8 bits, or float for tensors in floating point. Received: {shown(value)}.")


def _rule(value: Any) -> Any:
    if value is None or (isinstance(value, str) and _RULE.fullmatch(value)):
        return value
    raise refusal(f"expected minmax, mse or percentile:0.9999. Received: {shown(value)}.")


RangeRule = Annotated[str, BeforeValidator(_rule)]


class Quantize(Settings):
    """A step that puts weights on integer grids after training, as `pk.quantize`, and writes the integer LiteRT file.

    Attributes:
        weights: Bits of the weights, 2 to 8.
        activations: 8 bits for the tensors between layers, or "float".
        method: How weights are rounded.
        weight_ranges: Ranges of output channels; None means minmax for 8 bits and mse for fewer.
        activation_ranges: Ranges of tensors.
        correct_biases: Whether biases make up for mean errors; None means with GPTQ.
        equalize: Whether the ranges of channels are equalized first.
        calibration: Number of training examples that are read.
        include: Patterns of layers and weights to quantize; empty = all.
        exclude: Patterns of layers that compute in floating point.
        name: Stem of the file's name.
    """

    example: ClassVar[str] = "{weights: 8, activations: 8}"
    weights: Annotated[int, Field(ge=2, le=8)] = 8
    activations: Annotated[Literal[8, "float"], BeforeValidator(_activations)] = 8
    method: Literal["auto", "nearest", "gptq"] = "auto"
    weight_ranges: RangeRule | None = None
    activation_ranges: RangeRule = "mse"
    correct_biases: bool | None = None
    equalize: bool = False
    calibration: Count = 512
    include: WeightPatterns = ()
    exclude: WeightPatterns = ()
    name: Name = "model"

    @property
    def file(self) -> str:
        """Name of the written file."""
        return f"{self.name}-int{self.weights}{'' if self.activations == 8 else '-weights'}.tflite"
