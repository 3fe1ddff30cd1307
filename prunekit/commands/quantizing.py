"""The command that writes an integer file: quantize.

Keras and its backend are imported inside the command: --help starts fast.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from prunekit.commands.files import (
    check_distinct,
    check_files,
    data_options,
    examples_option,
    force_option,
    loaded,
    memory_option,
    misfits_option,
    other_option,
    other_options,
    pattern_option,
    pattern_options,
    showing_progress,
    write_model,
)
from prunekit.commands.output import print_json, print_sections
from prunekit.options import AtLeast, json_option, words
from prunekit.sparsity.shorthands import ActivationBits, Ranges, Rounding

_ACTIVATION_BITS = {str(bits): bits for bits in get_args(ActivationBits)}


@click.command()
@click.argument("model")
@click.option(
    "-o",
    "--output",
    metavar="NEW",
    required=True,
    help="The file to write: NAME.tflite, or NAME.keras with int8 layers.",
)
@click.option("--keras", metavar="NEW.keras", help="Also write the Keras model with the rounded weights as floats.")
@data_options("Training examples, for the ranges; not needed where tensors stay in floating point")
@examples_option
@click.option(
    "--bits",
    type=AtLeast(2, 8),
    show_default="8",
    help="Bits of the weights; 2 and 3 take the bytes of 4.",
)
@click.option(
    "--activation-bits",
    type=click.Choice(list(_ACTIVATION_BITS)),
    show_default="8; float for a .keras file",
    help="Bits of the tensors between layers; float leaves them in floating point.",
)
@click.option(
    "--group-size",
    type=AtLeast(1),
    help="A scale for every N inputs of each output, such as 32; with --activation-bits float.",
)
@click.option(
    "--method",
    type=click.Choice(get_args(Rounding)),
    default="auto",
    help="How weights are rounded; auto: gptq for fewer than 8 bits or with --sparsity.",
)
@click.option("--activation-ranges", default="mse", metavar="RULE", help=f"Ranges of tensors: {words(Ranges)}.")
@click.option(
    "--budget",
    type=AtLeast(1),
    metavar="BYTES",
    help="Choose 4 or 8 bits for each weight, with the least error, so that all weights fit in so many bytes.",
)
@click.option(
    "--sparsity",
    type=click.FloatRange(0, 1, max_open=True),
    metavar="FLOAT",
    help="Fraction of the weights to prune first, in [0, 1).",
)
@pattern_option
@misfits_option("skip", "Layers without integers: skip leaves them in floating point, error refuses MODEL")
@other_option("pk.quantize", "equalize=true")
@click.option(
    "--full-integer",
    is_flag=True,
    help="Normalizations, attention and recurrent layers become integers, too; MODEL is refused if anything would "
    "compute in floats.",
)
@click.option("--integer-io", is_flag=True, help="Inputs and outputs of the file are integers, not float32.")
@click.option("--uint8-io", is_flag=True, help="Inputs and outputs of the file are uint8, as cameras deliver pixels.")
@click.option("--sparse", is_flag=True, help="Encode kernels of the file sparsely where that is smaller.")
@pattern_options("quantize", "Layers and weights")
@memory_option
@force_option
@json_option
def quantize(  # noqa: PLR0913
    model: str,
    output: str,
    keras: str | None,
    bits: int | None,
    budget: int | None,
    activation_bits: str | None,
    integer_io: bool,
    uint8_io: bool,
    sparse: bool,
    force: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Write a model as an integer file, for LiteRT or for Keras.

    MODEL is a .keras file; it is not changed. The ranges of the tensors between layers are chosen from the examples;
    weights of fewer than 8 bits are fitted to what each layer computes on them. The file is run and compared with the
    model before it is kept."""
    others = other_options(options)
    activation_bits = activation_bits or ("float" if output.endswith(".keras") else "8")
    litert_only = {
        "--budget": budget is not None,
        "--full-integer": options["full_integer"],
        "--integer-io": integer_io,
        "--sparse": sparse,
        "--uint8-io": uint8_io,
    }
    if options["data"] is None and activation_bits != "float":
        raise click.UsageError(
            "Missing option '--data': ranges of tensors are chosen from examples. Or pass --activation-bits float."
        )
    if budget is not None and bits is not None:
        raise click.UsageError("--budget chooses the bits of each weight. Leave --bits out.")
    _check_format(
        output, activation_bits, options["group_size"], [name for name, given in litert_only.items() if given]
    )
    _check_names(model, output, keras, force)
    options |= {"activation_bits": _ACTIVATION_BITS[activation_bits], **others}
    found, data = loaded(model, options)
    from prunekit.delivery.integers.integer_report import IntegerExportError
    from prunekit.operations.choose_bits import choose_bits
    from prunekit.operations.quantize import quantize as quantize_model

    choice = None
    if budget is not None:
        with showing_progress("Measured") as progress:
            choice = choose_bits(found, data, budget=budget, progress=progress, **options)
    chosen_bits = (bits or 8) if choice is None else choice.bits
    with showing_progress("Quantized") as progress:
        done = quantize_model(found, data, progress=progress, bits=chosen_bits, **options)
    kinds = "uint8" if uint8_io else ("inputs", "outputs") if integer_io else ()
    try:
        exported = done.export(output, integer_io=kinds, sparse=sparse)
    except IntegerExportError as error:
        raise click.ClickException(str(error)) from error
    if keras is not None:
        write_model(done.model, Path(keras))
    if as_json:
        chosen = {} if choice is None else {"choice": choice.to_dict()}
        print_json({"path": output, **chosen, "report": done.to_dict(), "file": exported.to_dict()})
    else:
        _show(choice, done, exported)
    return 0


def _show(choice: Any, report: Any, exported: Any) -> None:
    """Prints the choice of bits if there is one, the report, and how the file compares."""
    if choice is not None:
        print_sections(choice)
    print_sections(report)
    print_sections(exported)
    for note in report.notes:
        click.echo(f"note: {note}")
    click.echo(f"\n{report.verdict()}\n{exported.verdict()}")


def _check_format(output: str, activation_bits: str, group_size: int | None, litert_only: Sequence[str]) -> None:
    """Raises a usage error where the format of the output cannot have what the options ask for."""
    if output.endswith(".keras") and litert_only:
        raise click.UsageError(
            f"{litert_only[0]} is about LiteRT files; a .keras file has float inputs and a byte for each code."
        )
    if {"--integer-io", "--uint8-io"} <= set(litert_only):
        raise click.UsageError("--uint8-io makes the integer inputs and outputs uint8. Leave --integer-io out.")
    if activation_bits != "8" and "--uint8-io" in litert_only:
        raise click.UsageError(
            f"--uint8-io is about activations of 8 bits. Received: --activation-bits {activation_bits}."
        )
    if activation_bits == "float" and "--full-integer" in litert_only:
        raise click.UsageError(
            "--full-integer is about files that compute with integers alone. Leave --activation-bits float out."
        )
    if activation_bits == "float" and "--sparse" in litert_only:
        raise click.UsageError("--sparse is about kernels of integer operations. Leave --activation-bits float out.")
    if activation_bits != "float" and group_size is not None:
        raise click.UsageError(
            f"--group-size is about files that compute in floating point: no integer kernel of LiteRT reads scales of "
            f"groups. Received: --activation-bits {activation_bits}. Pass --activation-bits float."
        )


def _check_names(model: str, output: str, keras: str | None, force: bool) -> None:
    """Raises a usage error unless the files to write can be written, and are others than the one to read."""
    check_files(model, output, force, (".tflite", ".keras"))
    if keras is not None:
        check_files(model, keras, force, option="--keras")
        check_distinct((output, "-o"), (keras, "--keras"))
