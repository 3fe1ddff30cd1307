"""Describes a recipe in words, for the terminal. Imports neither Keras nor rich."""

from prunekit.delivery.reports.formatting import clean
from prunekit.recipe.settings.schema import Recipe, Step
from prunekit.recipe.settings.sources import ModelSource


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
