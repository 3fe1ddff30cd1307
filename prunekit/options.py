"""Defines the arguments and options that several commands share."""

from collections.abc import Callable
from typing import Any, get_args

import click

from prunekit.sparsity.shorthands import ExportFormat


class AtLeast(click.IntRange):
    """A whole number with a minimum; replaces click's type name "integer range", which also appears in errors."""

    name = "whole number"

    def get_metavar(self, *_: Any, **__: Any) -> str:
        """Returns what stands for the number in the help."""
        return "N"


class Parsed(click.ParamType):
    """What a function makes of the text; its ValueError is a mistake of the option."""

    name = "value"

    def __init__(self, read: Callable[[str], Any]):
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns what the text means; a default is returned unchanged."""
        try:
            return self._read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def words(choices: Any) -> str:
    """Returns the choices of an option as a text, from a `Literal` or from names."""
    return ", ".join(map(str, get_args(choices) or choices))


def _pairs(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...], read: Any) -> dict[str, Any]:
    from prunekit.recipe.text.yaml_reader import RecipeError

    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"expected name=value. Received: {text!r}.", context, parameter)
        if name in values:
            raise click.BadParameter(f"{name!r} is set twice.", context, parameter)
        try:
            values[name] = read(value)
        except RecipeError as error:
            raise click.BadParameter(f"{name}: {error.message}", context, parameter) from None
    return values


def assignments(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
    """Reads the NAME=VALUE of an option that may be repeated; values are those of YAML."""
    if not texts:
        return {}
    from prunekit.recipe.text.yaml_reader import read_value

    return _pairs(context, parameter, texts, read_value)


def _lists(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
    if not texts:
        return {}
    from prunekit.recipe.text.grid import read_values

    return _pairs(context, parameter, texts, read_values)


def _shapes(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[int, ...] | dict[str, tuple[int, ...]] | None:
    """Returns the shape of all inputs, or {name: shape}; None without the option."""

    def read(text: str) -> tuple[int, ...]:
        try:
            return tuple(int(length) for length in text.split(","))
        except ValueError:
            raise click.BadParameter(
                f"expected sizes with the batch first, such as 1,128 or tokens=1,128. Received: {text!r}.",
                context,
                parameter,
            ) from None

    if len(texts) == 1 and "=" not in texts[0]:
        return read(texts[0])
    return _pairs(context, parameter, texts, read) or None


# Of the option --size.
SIZE = f"The size that is compared: smallest, weights-gzip, or a format ({words(ExportFormat)}), also with -gzip."
recipe_argument = click.argument("recipe")
input_shape_option = click.option(
    "--input-shape",
    "inputs",
    metavar="[NAME=]SIZES",
    multiple=True,
    callback=_shapes,
    help="Shape of the inputs, batch first, such as 1,128; of one input, NAME=1,128. May be repeated.",
)
set_option = click.option(
    "--set",
    "overrides",
    metavar="NAME=VALUE",
    multiple=True,
    callback=assignments,
    help="Value of a variable that the recipe declares, such as final=0.9. May be repeated.",
)
grid_option = click.option(
    "--over",
    metavar="NAME=VALUE,VALUE",
    multiple=True,
    callback=_lists,
    help="Values of a variable of the recipe, such as final=0.8,0.9. If repeated, all combinations are run.",
)
model_option = click.option("--model", metavar="FILE", help="A .keras file that replaces the recipe's model.")
trust_option = click.option(
    "--trust", is_flag=True, help="Allow the recipe to import and run the Python code it names."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of text.")
