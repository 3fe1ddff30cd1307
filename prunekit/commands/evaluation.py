"""The command that measures a model in a file: evaluate.

Keras and its backend are imported inside the command: --help starts fast.
"""

import click

from prunekit.commands.files import check_model, data_options
from prunekit.commands.output import print_json
from prunekit.options import AtLeast, json_option
from prunekit.terminal import load_keras_quietly


@click.command()
@click.argument("model")
@data_options("Examples with labels", required=True)
@click.option(
    "--like", metavar="FILE.keras", help="For a .tflite MODEL: the model whose loss and metrics are measured."
)
@click.option("--batch-size", type=AtLeast(1), default=128, help="Examples per batch.")
@json_option
def evaluate(model: str, data: str, label: str | None, like: str | None, batch_size: int, as_json: bool) -> int:
    """Measure loss and metrics of a .keras or .tflite file.

    MODEL is measured on the test part of DATA, or on all examples of data without parts. The loss and the metrics are
    those that a .keras file was compiled with; without them, and for a .tflite file, they are chosen by outputs and
    labels, as `prunekit init` does. The inputs and outputs of integer files are converted from and to numbers."""
    if not model.endswith((".keras", ".tflite")):
        raise click.UsageError(f"MODEL takes the name of a .keras or .tflite file. Received: {model!r}.")
    if like is not None and (model.endswith(".keras") or not like.endswith(".keras")):
        raise click.UsageError(f"--like takes the .keras file of a .tflite MODEL. Received: {like!r} for {model!r}.")
    for path in (model, *([] if like is None else [like])):
        check_model(path)
    load_keras_quietly()
    from prunekit.recipe.start.named_evaluation import evaluate_named

    found = evaluate_named(model, data, label, like, batch_size)
    if as_json:
        print_json(found.to_dict())
        return 0
    click.echo(f"{model}: {found.examples:,} examples of {data} ({found.part})")
    for name, value in found.metrics.items():
        click.echo(f"  {name}: {value:.4f}")
    if not found.compiled:
        click.echo("note: loss and metrics were chosen by outputs and labels: no compile settings were read.", err=True)
    return 0
