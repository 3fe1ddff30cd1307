"""Defines the fields of a recipe as frozen pydantic models. Reads no file and imports neither Keras nor NumPy.

These models reject every mistake that is visible in the recipe alone; `loader` adds the position in the file. The
settings of steps are in `step_settings`, and the kinds of steps in the registry `STEP_KINDS`.
"""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from prunekit.recipe.settings.compile_fields import Compile
from prunekit.recipe.settings.data_source import DataSource
from prunekit.recipe.settings.fields import Listed, Name, Settings, Text, refusal, with_path
from prunekit.recipe.settings.sources import ModelSource
from prunekit.recipe.settings.step_kinds import STEP_KINDS, StepKind

VERSION: Literal[1] = 1
# Limits only invalid steps: a recipe with this many valid steps exceeds the reader's limit on values first.
MOST_STEPS = 1_000


class Step(Settings):
    """One step of a recipe: one field for each kind in `STEP_KINDS`, of which exactly one is set."""

    example: ClassVar[str] = "train: {epochs: 10}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.exactly_one(*STEP_KINDS)

    @property
    def kind(self) -> str:
        """Name of the step's kind, such as "train"."""
        return self.given(*STEP_KINDS)[0]

    @property
    def row(self) -> StepKind:
        """The step's kind: its row of `STEP_KINDS`."""
        return STEP_KINDS[self.kind]

    @property
    def settings(self) -> Any:
        """Settings of the step, of the class that its kind names."""
        return getattr(self, self.kind)

    @property
    def trains(self) -> bool:
        """True if the step runs the optimizer."""
        return self.row.trains(self.settings)

    @property
    def reads_data(self) -> bool:
        """True if the step needs data for another reason than training."""
        return self.row.reads_data(self.settings)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the step compares with bounds."""
        return self.row.metrics(self.settings)

    @property
    def changes_weights(self) -> bool:
        """True if the step may change weights."""
        return self.row.changes_weights(self.settings)

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of the exported files that the step writes."""
        return self.row.formats(self.settings)


def _add_field(kind: StepKind) -> None:
    annotation: Any = kind.settings | None
    Step.model_fields[kind.name] = FieldInfo(annotation=annotation, default=None)
    Step.__annotations__[kind.name] = annotation


for _kind in STEP_KINDS.values():
    _add_field(_kind)
Step.model_rebuild(force=True)


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
    steps: Annotated[tuple[Step, ...], Listed, Field(min_length=1, max_length=MOST_STEPS)]

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        self._check_training(need_data=bool((info.context or {}).get("need_data")))
        for i, step in enumerate(self.steps):
            try:
                step.row.check(step.settings, self.steps[:i])
            except PydanticCustomError as error:
                raise with_path(error, "steps", i, step.kind) from None
        return self

    def _check_training(self, need_data: bool) -> None:
        for i, step in enumerate(self.steps):
            if step.trains and self.compile is None:
                raise refusal(
                    "this step trains, and the recipe has no 'compile': add for example "
                    "compile: {optimizer: adam, loss: sparse_categorical_crossentropy}.",
                    *("steps", i, step.kind),
                )
        i_needs = self.needs_data()
        if need_data and self.data is None and i_needs is not None:
            step = self.steps[i_needs]
            what = "trains" if step.trains else f"measures {step.metrics[0]}" if step.metrics else "reads data"
            raise refusal(
                f"this step {what}, and the recipe has no 'data': add for example data: {{builtin: digits}}.",
                *("steps", i_needs, step.kind),
            )

    def needs_data(self) -> int | None:
        """Returns the index of the first step that needs data, or None."""
        needing = (i for i, step in enumerate(self.steps) if step.trains or step.metrics or step.reads_data)
        return next(needing, None)

    def factories(self) -> tuple[str, ...]:
        """Returns the Python functions that a run would import and call, such as 'model: my.models:build'."""
        sources = {"model": self.model, "data": self.data}
        found = [f"{part}: {source.factory}" for part, source in sources.items() if source and source.factory]
        return (*found, *(f"compile: {factory}" for factory in (self.compile.factories if self.compile else ())))


def register_step(kind: StepKind) -> StepKind:
    """Registers a kind of step, so that recipes may name it, and returns it.

    Recipes that were loaded before stay valid. Registering the same row again changes nothing.

    Raises:
        ValueError: The name is taken, is not a Python identifier, or is an attribute of `Step`.
    """
    if kind.name not in STEP_KINDS and (not kind.name.isidentifier() or hasattr(Step, kind.name)):
        raise ValueError(
            f"The name of a step kind is a Python identifier that is no attribute of Step. Received: {kind.name!r}."
        )
    STEP_KINDS.add(kind)
    _add_field(kind)
    _rebuild()
    return kind


def unregister_step(name: str) -> None:
    """Removes a kind of step, for tests of extensions.

    Raises:
        KeyError: No such kind is registered.
    """
    STEP_KINDS.remove(name)
    del Step.model_fields[name], Step.__annotations__[name]
    _rebuild()


def _rebuild() -> None:
    Step.model_rebuild(force=True)
    Recipe.model_rebuild(force=True)
