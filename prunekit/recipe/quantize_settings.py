"""Settings of the step kind quantize. Reads no file and imports neither Keras nor NumPy."""

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from prunekit.recipe.fields import Count, Epochs, Name, Positive, Settings, WeightPatterns, refusal, shown

# Ends of the names of the files, by the activations.
_ENDINGS = {8: "", 16: "-activations16", "float": "-weights"}
_RULE = re.compile(r"minmax|mse|percentile(:0?\.\d+)?")


def _activations(value: Any) -> Any:
    if value in (8, 16, "float"):
        return value
    raise refusal(f"expected 8 or 16 bits, or float for tensors in floating point. Received: {shown(value)}.")


def _rule(value: Any) -> Any:
    if value is None or (isinstance(value, str) and _RULE.fullmatch(value)):
        return value
    raise refusal(f"expected minmax, mse or percentile:0.9999. Received: {shown(value)}.")


RangeRule = Annotated[str, BeforeValidator(_rule)]


class Quantize(Settings):
    """A step that puts weights on integer grids, and writes the integer LiteRT file.

    Without `epochs` it quantizes after training, as `pk.quantize`; with them it trains on integers, as a
    `QuantizationCallback`.

    Attributes:
        epochs: Epochs of training on integers; None = no training.
        learning_rate: Learning rate of this training; None means that of the recipe's compile settings.
        begin_epoch: Number of epochs in floating point before it; the step trains `epochs` epochs in all.
        weights: Bits of the weights, 2 to 8.
        activations: 8 or 16 bits for the tensors between layers, or "float".
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
    epochs: Epochs | None = None
    learning_rate: Positive | None = None
    begin_epoch: Annotated[int, Field(ge=0)] = 0
    weights: Annotated[int, Field(ge=2, le=8)] = 8
    activations: Annotated[Literal[8, 16, "float"], BeforeValidator(_activations)] = 8
    method: Literal["auto", "nearest", "gptq"] = "auto"
    weight_ranges: RangeRule | None = None
    activation_ranges: RangeRule = "mse"
    correct_biases: bool | None = None
    equalize: bool = False
    calibration: Count = 512
    include: WeightPatterns = ()
    exclude: WeightPatterns = ()
    name: Name = "model"

    @model_validator(mode="after")
    def _of_training(self) -> Self:
        if self.epochs is None:
            for name in ("learning_rate", "begin_epoch"):
                if self._is_given(name):
                    raise refusal(f"{name} is about a training on integers: write epochs, too.", name)
            return self
        for name in ("method", "correct_biases", "equalize"):
            if self._is_given(name):
                raise refusal(f"{name} is about rounding without training. Remove it, or remove epochs.", name)
        if self.begin_epoch >= self.epochs:
            raise refusal(
                f"the training on integers begins before the last epoch. Received: begin_epoch {self.begin_epoch} "
                f"and epochs {self.epochs}.",
                "begin_epoch",
            )
        return self

    def _is_given(self, name: str) -> bool:
        # Not `model_fields_set`: the recipe that a run locks has every setting.
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def file(self) -> str:
        """Name of the written file."""
        return f"{self.name}-int{self.weights}{_ENDINGS[self.activations]}.tflite"
