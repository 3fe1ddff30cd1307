"""Settings of the step kinds export, pack and expect. Reads no file and imports neither Keras nor NumPy."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from prunekit.delivery.reports.rows import INTEGERS, names_integers
from prunekit.recipe.settings.fields import Count, Fraction, Listed, Name, Settings, refusal, shown, unit_interval
from prunekit.recipe.settings.step_base import Bounds, StepSettings
from prunekit.sparsity.shorthands import ExportFormat


def _format(value: Any) -> Any:
    if isinstance(value, str) and value not in get_args(ExportFormat) and names_integers(value):
        raise refusal(f"unknown format {shown(value)}. {INTEGERS}")
    return value


# Export steps write all but the last one, which is the format of a quantize step's file.
FileFormat: TypeAlias = Literal[ExportFormat, "litert-integer"]


class Export(StepSettings):
    """A step that writes the current model in each format, under one name."""

    example: ClassVar[str] = "{formats: [keras, litert]}"
    formats: Annotated[tuple[Annotated[ExportFormat, BeforeValidator(_format)], ...], Listed, Field(min_length=1)]
    name: Name = "model"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i, name in enumerate(self.formats):
            if name in self.formats[:i]:
                raise refusal(f"format {name!r} is listed twice.", "formats", i)
        return self

    @property
    def written_formats(self) -> tuple[str, ...]:
        """The formats."""
        return self.formats

    def text(self) -> str:
        """Returns formats and name."""
        return f"{', '.join(self.formats)} as {self.name!r}"

    def check(self, earlier: Sequence[Any]) -> None:
        """Refuses the name of an earlier export step."""
        if any(isinstance(step, Export) and step.name == self.name for step in earlier):
            raise refusal(
                f"an earlier export step already writes files named {self.name!r}: give this one another 'name'.",
                "name",
            )


class Pack(StepSettings):
    """A step that packs exported files: NAME.pack beside each of them.

    Attributes:
        formats: The formats whose files are packed; None = all that were exported before.
    """

    example: ClassVar[str] = "{formats: [litert]}"
    # Nothing that a resumed run needs is in memory.
    checkpointed: ClassVar[bool] = False
    formats: Annotated[tuple[FileFormat, ...], Listed, Field(min_length=1)] | None = None

    def packs(self, name: str) -> bool:
        """Returns True if the step packs exported files of this format."""
        return self.formats is None or name in self.formats

    def text(self) -> str:
        """Returns the formats."""
        return "all exported files" if self.formats is None else ", ".join(self.formats)

    def check(self, earlier: Sequence[Any]) -> None:
        """Refuses formats of which no earlier step writes a file."""
        exported = [name for step in earlier for name in step.written_formats]
        if not exported:
            raise refusal("there is no file to pack: no export or quantize step comes before.")
        for i, name in enumerate(self.formats or ()):
            if name not in exported:
                raise refusal(
                    f"{name!r} is not exported before this step (exported so far: "
                    f"{', '.join(dict.fromkeys(exported))}).",
                    "formats",
                    i,
                )


def _numbers(value: Any) -> Any:
    """Refuses other kinds first: of a union of kinds, the first one would be named as the expected kind."""
    for name, most in value.items() if isinstance(value, Mapping) else ():
        if name != "relative" and not isinstance(most, int | float):
            raise refusal(f"expected the largest drop that is allowed, a number. Received: {shown(most)}.", str(name))
    return value


def _drops(value: dict[str, bool | float]) -> dict[str, bool | float]:
    for name, most in value.items():
        if name == "relative":
            if not isinstance(most, bool):
                raise refusal(f"'relative' is true or false. Received: {shown(most)}.", name)
        elif isinstance(most, bool) or most < 0:
            raise refusal(f"expected the largest drop that is allowed, at least 0. Received: {shown(most)}.", name)
    if not set(value) - {"relative"}:
        raise refusal("expected at least one metric, such as {mae: 0.02}.")
    return value


class ByteBound(Settings):
    """Upper bounds on a file's size in bytes: `max` as written, `gzip_max` after gzip, `packed_max` after `pack`."""

    example: ClassVar[str] = "{max: 100000} or {gzip_max: 20000}"
    max: Count | None = None
    gzip_max: Count | None = None
    packed_max: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.at_least_one("max", "gzip_max", "packed_max")


class Expect(StepSettings):
    """A step that fails the run if a bound is not met.

    Attributes:
        metrics: Bounds on metrics of the current model, or on its loss.
        drop: Metric -> by how much it may be worse than before the first step that prunes or makes the model smaller:
            lower where higher is better, else higher. With `relative: true` as a fraction of the value before.
        sparsity: Bounds on the sparsity over all targets of the prune steps so far.
        bytes: Bounds on the size of an exported file, by name of the format.
    """

    example: ClassVar[str] = "{metrics: {accuracy: {min: 0.96}}, bytes: {litert: {max: 100000}}}"
    checkpointed: ClassVar[bool] = False
    gone: ClassVar[Mapping[str, str]] = {
        "accuracy": "metrics: {accuracy: {min: 0.96}}",
        "accuracy_drop": "drop: {accuracy: 0.02}",
    }
    metrics: dict[str, Bounds[float]] | None = None
    drop: Annotated[dict[str, bool | float], BeforeValidator(_numbers), AfterValidator(_drops)] | None = None
    sparsity: Bounds[Fraction] | None = None
    bytes: dict[FileFormat, ByteBound] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bytes is not None and not self.bytes:
            raise refusal("expected at least one exported format, such as {litert: {max: 100000}}.", "bytes")
        if self.metrics is not None and not self.metrics:
            raise refusal("expected at least one metric, such as {mae: {max: 0.3}}.", "metrics")
        accuracy = (self.metrics or {}).get("accuracy")
        for side, value in accuracy.model_dump(exclude_none=True).items() if accuracy else ():
            unit_interval(value, True, "metrics", "accuracy", side)
        return self.at_least_one("metrics", "drop", "sparsity", "bytes")

    @property
    def drops(self) -> dict[str, float]:
        """Metric -> largest drop, from `drop`."""
        return {name: float(most) for name, most in (self.drop or {}).items() if name != "relative"}

    @property
    def drops_are_relative(self) -> bool:
        """True if `drop` holds fractions of the values before pruning."""
        return bool((self.drop or {}).get("relative", False))

    @property
    def bounded_metrics(self) -> tuple[str, ...]:
        """Names of the metrics in `metrics` and `drop`."""
        return tuple(dict.fromkeys([*(self.metrics or {}), *self.drops]))

    def text(self) -> str:
        """Returns the bounds."""
        bounds = self.model_dump(exclude_none=True)
        drop, sizes = bounds.pop("drop", {}), bounds.pop("bytes", {})
        bounds |= bounds.pop("metrics", {})
        relative = "relative " if drop.pop("relative", False) else ""
        bounds |= {f"{relative}drop of {name}": {"max": most} for name, most in drop.items()}
        bounds |= {f"bytes of {name}": bound for name, bound in sizes.items()}
        words = {"min": "at least", "max": "at most", "gzip_max": "compressed at most", "packed_max": "packed at most"}
        return ", ".join(
            f"{what.replace('_', ' ')} {' and '.join(f'{words[k]} {v:.15g}' for k, v in bound.items())}"
            for what, bound in bounds.items()
        )

    def check(self, earlier: Sequence[Any]) -> None:
        """Refuses bounds on what no earlier step makes."""
        if not any(step.prunes for step in earlier):
            for name in self.given("sparsity"):
                raise refusal(f"{name!r} can be measured only after a prune step.", name)
            changed = any(step.returns_new_model or step.leaves for step in earlier)
            for name in [] if changed else self.given("drop"):
                raise refusal(
                    f"{name!r} can be measured only after a prune step, a step that makes the model smaller, or a "
                    "cluster or quantize step.",
                    name,
                )
        exported = list(dict.fromkeys(name for step in earlier for name in step.written_formats))
        for name in self.bytes or {}:
            if name not in exported:
                already = f"exported so far: {', '.join(exported)}" if exported else "no export step comes before"
                raise refusal(
                    f"{name!r} has no size to check: it is not exported before this step ({already}).", "bytes", name
                )
        for name, bound in (self.bytes or {}).items():
            if bound.packed_max is not None and not any(step.packs(name) for step in earlier):
                raise refusal(f"no pack step before this one packs {name!r}.", "bytes", name, "packed_max")
