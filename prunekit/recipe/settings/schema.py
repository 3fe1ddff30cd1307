"""Defines the fields of a recipe as frozen pydantic models. Reads no file and imports neither Keras nor NumPy.

These models reject every mistake that is visible in the recipe alone; `loader` adds the position in the file. The
settings of steps are in the modules `*_settings`, and the kinds of steps in the registry `STEP_KINDS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    SerializationInfo,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from prunekit.delivery.reports.formatting import clean
from prunekit.recipe.settings.compile_fields import Compile
from prunekit.recipe.settings.data_source import DataSource
from prunekit.recipe.settings.fields import Listed, Name, Settings, Text, refusal, shown, unknown, with_path
from prunekit.recipe.settings.sources import ModelSource
from prunekit.recipe.settings.step_kinds import STEP_KINDS, StepKind

VERSION: Literal[1] = 1
# Limits only invalid steps: a recipe with this many valid steps exceeds the reader's limit on values first.
MOST_STEPS = 1_000


@dataclass(frozen=True)
class Step:
    """One step of a recipe, which writes it as a mapping of one key.

    Attributes:
        kind: Name of the step's kind, such as "train".
        settings: Settings of the step, of the class that its kind names.
    """

    kind: str
    settings: Any


@cache
def _by_kind(settings: Any) -> TypeAdapter[dict[str, Any]]:
    """Returns the validator of a mapping from a kind to its settings, whose errors begin with the kind."""
    return TypeAdapter(dict[str, settings])


def _step(value: Any, info: ValidationInfo) -> Step:
    if isinstance(value, Step):
        return value
    if not isinstance(value, Mapping):
        raise refusal(f"expected a mapping, such as train: {{epochs: 10}}. Received: {shown(value)}.")
    for key in value:
        if key not in STEP_KINDS:
            raise unknown("key", key, STEP_KINDS, key)
    given = [name for name in STEP_KINDS if name in value]
    if len(given) != 1:
        only, found = ("only ", " and ".join(given)) if given else ("", "none of them")
        raise refusal(f"expected {only}one of {', '.join(STEP_KINDS)}. Received: {found}.", *given[1:2])
    (kind,) = given
    # `- simplify:` has no settings.
    own = {} if value[kind] is None else value[kind]
    settings = _by_kind(STEP_KINDS[kind].settings).validate_python({kind: own}, context=info.context)
    return Step(kind, settings[kind])


def _written(step: Step, info: SerializationInfo) -> dict[str, Any]:
    return {step.kind: step.settings.model_dump(mode=info.mode, exclude_none=info.exclude_none)}


Variable: TypeAlias = str | int | float | bool | None


class Recipe(Settings):
    """A whole recipe: model, data and ordered steps, with every default filled in."""

    example: ClassVar[str] = "{version: 1, model: ..., steps: [...]}"
    version: Literal[1] = VERSION
    name: Name = "recipe"
    description: Text = ""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    variables: dict[str, Variable] = {}
    model: ModelSource | None = None
    data: DataSource | None = None
    compile: Compile | None = None
    distribute: Literal["mirrored", "multi_worker", "data_parallel"] | None = None
    steps: Annotated[
        tuple[Annotated[Step, PlainValidator(_step), PlainSerializer(_written)], ...],
        Listed,
        Field(min_length=1, max_length=MOST_STEPS),
    ]

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        self._check_training(need_data=bool((info.context or {}).get("need_data")))
        for i, step in enumerate(self.steps):
            try:
                step.settings.check([before.settings for before in self.steps[:i]])
            except PydanticCustomError as error:
                raise with_path(error, "steps", i, step.kind) from None
        return self

    def _check_training(self, need_data: bool) -> None:
        for i, step in enumerate(self.steps):
            if step.settings.trains and self.compile is None:
                raise refusal(
                    "this step trains, and the recipe has no 'compile': add for example "
                    "compile: {optimizer: adam, loss: sparse_categorical_crossentropy}.",
                    *("steps", i, step.kind),
                )
        i_needs = self.needs_data()
        if need_data and self.data is None and i_needs is not None:
            step = self.steps[i_needs]
            metrics = step.settings.bounded_metrics
            what = "trains" if step.settings.trains else f"measures {metrics[0]}" if metrics else "reads data"
            raise refusal(
                f"this step {what}, and the recipe has no 'data': add for example data: {{builtin: digits}}.",
                *("steps", i_needs, step.kind),
            )

    def needs_data(self) -> int | None:
        """Returns the index of the first step that needs data, or None."""
        for i, step in enumerate(self.steps):
            if step.settings.trains or step.settings.bounded_metrics or step.settings.reads_data:
                return i
        return None

    def factories(self) -> tuple[str, ...]:
        """Returns the Python functions that a run would import and call, such as 'model: my.models:build'."""
        sources = {"model": self.model, "data": self.data}
        found = [f"{part}: {source.factory}" for part, source in sources.items() if source and source.factory]
        return (*found, *(f"compile: {factory}" for factory in (self.compile.factories if self.compile else ())))


def source_text(recipe: Recipe, part: str) -> str | None:
    """Returns the source of the `part` "model" or "data" as text, or None if the recipe names no source."""
    source = getattr(recipe, part)
    if source is None:
        return None
    if isinstance(source, ModelSource):
        return clean(source.text)
    value = getattr(source, source.kind)
    return clean(f"{source.kind} {value if isinstance(value, str) else 'files'}")


def step_text(step: Step) -> str:
    """Returns a step as one line of text."""
    return f"{step.kind}: {described(step)}"


def described(step: Step) -> str:
    """Returns a step as one line of text, without its kind."""
    return clean(step.settings.text())


def register_step(kind: StepKind) -> StepKind:
    """Registers a kind of step, so that recipes may name it, and returns it.

    Recipes that were loaded before stay valid. Registering the same row again changes nothing.

    Raises:
        ValueError: The name is taken, or is not a Python identifier.
    """
    if not kind.name.isidentifier():
        raise ValueError(f"The name of a step kind is a Python identifier. Received: {kind.name!r}.")
    return STEP_KINDS.add(kind)


def unregister_step(name: str) -> None:
    """Removes a kind of step, for tests of extensions.

    Raises:
        KeyError: No such kind is registered.
    """
    STEP_KINDS.remove(name)
