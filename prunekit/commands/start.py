"""The command that writes a first recipe: init."""

from pathlib import Path
from typing import get_args

import click

from prunekit.commands.files import data_options, force_option
from prunekit.commands.output import check_writable, noting_new_folder, print_json
from prunekit.options import json_option
from prunekit.sparsity.shorthands import Goal
from prunekit.terminal import load_keras_quietly


@click.command()
@click.argument("model", required=False)
@data_options("Examples for training and test")
@click.option("--goal", type=click.Choice(get_args(Goal)), help="Where the model will run.")
@click.option("-o", "--output", metavar="FILE.yaml", default="recipe.yaml", help="The recipe to write.")
@force_option
@json_option
def init(
    model: str | None, data: str | None, label: str | None, goal: Goal | None, output: str, force: bool, as_json: bool
) -> int:
    """Write a recipe to start from.

    The recipe is a commented .yaml file: change it, look at its plan with `prunekit check FILE.yaml --plan`, and run it
    with `prunekit compress FILE.yaml`. With DATA it prunes MODEL while it trains, exports and quantizes it, and states
    what must hold at the end; without DATA it prunes MODEL once, without training.

    MODEL is a .keras file; a built-in model such as digits-cnn; or, for a folder of images, a model of
    keras.applications such as MobileNetV2, which is trained from the start. Without MODEL, one is taken that fits
    built-in data or images; without MODEL and DATA, the recipe is about digits.

    With --goal the recipe has the steps that pay there: for a phone, channels are removed, weights pruned and rounded
    to 8-bit integers; for a microcontroller, channels are removed and everything becomes 8-bit integers; for a server,
    half of the multiply-accumulates go."""
    target = Path(output)
    if target.suffix not in (".yaml", ".yml"):
        raise click.UsageError(f"a recipe is a .yaml file. Received: -o {output}.")
    if target.exists() and not force:
        raise click.UsageError(f"{output} exists already. Pass --force to replace it, or -o FILE.yaml.")
    check_writable(output)
    if label is not None and data is None:
        raise click.UsageError("--label needs --data.")
    load_keras_quietly()
    from prunekit.recipe.start.starting_recipe import Start, write_starting_recipe

    with noting_new_folder(target.parent):
        text, notes = write_starting_recipe(Start(model, data, label, target, goal))
    if as_json:
        print_json({"path": output, "text": text, "notes": list(notes)})
        return 0
    click.echo(text, nl=False)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"\nWritten to {output}. Next: prunekit check {output} --plan", err=True)
    return 0
