"""Describes a recipe in words, for the terminal. Imports neither Keras nor rich."""

from collections.abc import Callable
from typing import Any

from prunekit.delivery.formatting import clean
from prunekit.recipe.schema import Expect, Export, Prune, Recipe, Step, Train


def source_text(recipe: Recipe, part: str) -> str | None:
    """Returns the source of the `part` "model" or "data" as text, or None if the recipe names no source."""
    source = getattr(recipe, part)
    if source is None:
        return None
    value = getattr(source, source.kind)
    return clean(f"{source.kind} {value if isinstance(value, str) else 'files'}")


def step_text(step: Step) -> str:
    """Returns a step as one line of text."""
    texts: dict[str, Callable[[Any], str]] = {
        "train": _train_text,
        "finetune": _train_text,
        "prune": _prune_text,
        "export": _export_text,
        "expect": _expect_text,
    }
    return clean(f"{step.kind}: {texts[step.kind](step.settings)}")


def _train_text(train: Train) -> str:
    rate = "" if train.learning_rate is None else f", learning rate {train.learning_rate:g}"
    zeros = "" if train.keep_zeros else ", zeros that the model came with may grow back"
    return f"{train.epochs} epoch{'s' if train.epochs > 1 else ''}{rate}{zeros}"


def _prune_text(prune: Prune) -> str:
    if prune.schedule is None:
        parts = [f"to {prune.final_sparsity:g} at once"]
    else:
        moments = ", ".join(f"{path[-1]} {moment}" for path, moment in prune.schedule.moments().items())
        parts = [f"{prune.epochs} epochs, {prune.schedule.type} to {prune.final_sparsity:g}, {moments}"]
    if prune.learning_rate is not None:
        parts.append(f"learning rate {prune.learning_rate:g}")
    parts += [str(prune.criterion), prune.pattern, str(prune.allocation)]
    if prune.policy != "gradual":
        parts.append(f"policy {prune.policy}")
    for name, patterns in (("include", prune.include), ("exclude", prune.exclude)):
        if patterns:
            parts.append(f"{name} {' '.join(patterns)}")
    if prune.compat is not None:
        parts.append(f"by the rules of {prune.compat}")
    return ", ".join(parts)


def _export_text(export: Export) -> str:
    return f"{', '.join(export.formats)} as {export.name!r}"


def _expect_text(expect: Expect) -> str:
    bounds = expect.model_dump(exclude_none=True)
    sizes = bounds.pop("bytes", {})
    bounds |= {f"bytes of {name}": bound for name, bound in sizes.items()}
    words = {"min": "at least", "max": "at most", "gzip_max": "compressed at most"}
    return ", ".join(
        f"{what.replace('_', ' ')} {' and '.join(f'{words[k]} {v:.15g}' for k, v in bound.items())}"
        for what, bound in bounds.items()
    )
