"""The command that writes an integer file: quantize.

Keras and its backend are imported inside the command: --help starts fast.
"""

import itertools
from pathlib import Path
from typing import Any

import click

from prunekit.commands.files import (
    check_files,
    examples_option,
    force_option,
    pattern_options,
    read_examples,
    showing_progress,
    write_model,
)
from prunekit.commands.output import print_json, print_sections
from prunekit.options import json_option
from prunekit.terminal import load_keras_quietly

_ACTIVATIONS = {"8": 8, "16": 16, "float": None}


@click.command()
@click.argument("model")
@click.option(
    "-o",
    "--output",
    metavar="NEW",
    required=True,
    help="The file to write: NAME.tflite, or NAME.keras with int8 layers.",
)
@click.option("--keras", metavar="NEW.keras", help="Also write the Keras model whose weights lie on the grids.")
@click.option(
    "--data", metavar="DATA", required=True, help="Training examples: an .npz file or a saved data set; for the ranges."
)
@examples_option(512)
@click.option("--bits", type=click.IntRange(2, 8), default=8, help="Bits of the weights.  [default: 8]")
@click.option(
    "--activations",
    type=click.Choice(list(_ACTIVATIONS)),
    help="Bits of the tensors between layers, or float.  [default: 8; float for a .keras file]",
)
@click.option(
    "--method",
    type=click.Choice(["auto", "nearest", "gptq"]),
    default="auto",
    help="How weights are rounded; auto: gptq for fewer than 8 bits.  [default: auto]",
)
@click.option(
    "--ranges", default="mse", help="Ranges of the tensors: mse, minmax or percentile:0.9999.  [default: mse]"
)
@click.option("--integer-io", is_flag=True, help="Inputs and outputs of the file are integers, not float32.")
@pattern_options("quantize", "Layers and weights")
@force_option
@json_option
def quantize(  # noqa: PLR0913
    model: str,
    output: str,
    keras: str | None,
    data: str,
    examples: int,
    bits: int,
    activations: str | None,
    ranges: str,
    integer_io: bool,
    force: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Write a model as an integer file, for LiteRT or for Keras.

    MODEL is a .keras file; it is not changed. The ranges of the tensors between layers are chosen from the examples;
    weights of fewer than 8 bits are fitted to what each layer computes on them. The file is run and compared with the
    model before it is kept."""
    check_files(model, output, force, (".tflite", ".keras"))
    if activations is None:
        activations = "8" if output.endswith(".tflite") else "float"
    if keras is not None:
        check_files(model, keras, force, option="--keras")
    files = [(model, "MODEL"), (output, "-o"), *([] if keras is None else [(keras, "--keras")])]
    for (one, first), (other, second) in itertools.combinations(files, 2):
        if Path(one).resolve() == Path(other).resolve():
            raise click.UsageError(f"{second} names a new file; {first} is another one. Received: {other!r} for both.")
    load_keras_quietly()
    from prunekit.anatomy.model_files import load_model
    from prunekit.delivery.integer_report import IntegerExportError
    from prunekit.delivery.quantizing import quantize as quantize_model

    found, given = load_model(model, compile=False), read_examples(data, examples)
    with showing_progress("Quantized", shown=True) as progress:
        done = quantize_model(
            found,
            given,
            progress=progress,
            weights=bits,
            activations=_ACTIVATIONS[activations],
            activation_ranges=ranges,
            **options,
        )
    try:
        exported = done.export(output, integer_io=("inputs", "outputs") if integer_io else ())
    except IntegerExportError as error:
        raise click.ClickException(str(error)) from error
    if keras is not None:
        write_model(done.model, Path(keras))
    if as_json:
        print_json({"path": output, "report": done.report.to_dict(), "file": exported.to_dict()})
        return 0
    print_sections(done.report)
    print_sections(exported)
    click.echo(f"\n{done.report.verdict()}\n{exported.verdict()}")
    return 0
