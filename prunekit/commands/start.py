"""The command that writes a first recipe: init."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from prunekit.commands.output import check_writable, noting_new_folder, print_json
from prunekit.options import json_option
from prunekit.terminal import load_keras_quietly

if TYPE_CHECKING:
    from prunekit.recipe.start.starting_steps import Goal


@click.command()
@click.argument("model", required=False)
@click.option("--data", metavar="DATA", help="digits, diabetes or fashion-mnist; a .csv or .npz file; a folder.")
@click.option("--label", metavar="COLUMN", help="The column or part that holds the labels.")
@click.option("--goal", type=click.Choice(["phone", "microcontroller", "server"]), help="Where the model will run.")
@click.option("-o", "--output", metavar="FILE.yaml", default="recipe.yaml", help="The recipe.  [default: recipe.yaml]")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def init(
    model: str | None, data: str | None, label: str | None, goal: "Goal | None", output: str, force: bool, as_json: bool
) -> int:
    """Write a recipe to start from.

    MODEL is a .keras file, a built-in model such as digits-cnn, or a model of keras.applications such as MobileNetV2.
    The recipe prunes that model on DATA, a folder holding images in one folder for each class, or a data set that
    tf.data.Dataset.save wrote. Without DATA, the recipe prunes a file once, without training. Without MODEL, the model
    for a folder of images is MobileNetV2, which is trained from the start.

    With --goal the recipe has the steps that pay there: removed channels, zeros and 8-bit integers for a phone; removed
    channels and nothing but 8-bit integers for a microcontroller; half of the arithmetic for a server."""
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
