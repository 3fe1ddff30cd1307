"""Settings of `distill` in steps that train. Reads no file and imports neither Keras nor NumPy."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, model_validator

from prunekit.recipe.settings.fields import FilePath, Memory, Positive, Settings, refusal, shown
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.shorthands import DistillationLoss


def _share(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or 0 <= value <= 1:
        return value
    hint = f" Write {value / 100:g} for {value:g} %." if 1 < value <= 100 else ""
    raise refusal(f"expected the share of the distillation loss, 0 to 1. Received: {shown(value)}.{hint}")


def _layers(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list | tuple) and all(isinstance(one, str) and one for one in names):
        return {one: one for one in names}
    if isinstance(names, Mapping) and all(isinstance(one, str) and one for pair in names.items() for one in pair):
        return dict(names)
    raise refusal(
        "expected names of layers, such as [conv_1, conv_2], or {layer of the model: layer of the teacher}. Received: "
        f"{shown(value)}."
    )


class Distill(Settings):
    """What the model learns from a teacher while a step trains, as `pk.DistillationCallback`.

    Attributes:
        teacher: A `.keras` file; None = the model before its first compression.
        features: {layer of the model: layer of the teacher}; a list stands for equal names.
    """

    example: ClassVar[str] = "{weight: 0.9}, or true"
    teacher: FilePath | None = None
    loss: DistillationLoss = "auto"
    weight: Annotated[float, BeforeValidator(_share)] = 0.5
    temperature: Positive = 4.0
    features: Annotated[dict[str, str], BeforeValidator(_layers)] = {}
    feature_weight: Positive = 1.0
    cache: bool = True
    memory: Memory = MEMORY

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.teacher is not None and not self.teacher.endswith(".keras"):
            raise refusal(f"only .keras files are read (in safe mode). Received: {shown(self.teacher)}.", "teacher")
        return self

    def text(self) -> str:
        """Returns the teacher and the loss."""
        return f"distilled from {'the model before' if self.teacher is None else self.teacher} ({self.loss})"


def _true_or_mapping(value: Any) -> Any:
    if value is None or isinstance(value, Mapping | Distill):
        return value
    if isinstance(value, bool):
        return {} if value else None
    raise refusal(f"expected true, or a mapping such as {{weight: 0.9}}. Received: {shown(value)}.")


# `true` = with the defaults; `false` and null = none.
Distilled = Annotated[Distill | None, BeforeValidator(_true_or_mapping)]


def check_distilled(step: Any, earlier: Sequence[Any]) -> None:
    """Refuses a distillation in a step that does not train, and one without a model before the compression.

    Args:
        step: Settings of a step with a field `distill`.
        earlier: Settings of the steps before it.
    """
    if step.distill is None:
        return
    if not step.trains:
        raise refusal("a model learns from a teacher while it trains: write epochs, too.", "distill")
    compresses = [one for one in (*earlier, step) if one.changes_weights and not one.only_trains]
    if step.distill.teacher is None and not compresses:
        raise refusal(
            "the teacher is the model before its compression, and no step before this one compresses it. Write the "
            "path of a teacher, such as distill: {teacher: trained.keras}, or leave it out.",
            "distill",
        )
