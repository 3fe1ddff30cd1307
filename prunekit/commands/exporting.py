"""The command that writes a model in other formats: export.

Keras and its backend are imported inside the command: --help starts fast.
"""

import shlex
from pathlib import Path
from typing import Any

import click

from prunekit.commands.files import check_distinct, check_model, data_options, examples_option, force_option
from prunekit.commands.output import check_new, check_writable, noting_new_folder, print_json
from prunekit.delivery.reports.rows import NEEDS_DATA
from prunekit.options import AtLeast, json_option, words
from prunekit.sparsity.shorthands import ExportFormat
from prunekit.terminal import console, load_keras_quietly

_FILES = (".keras", ".tflite")
# Parts of the names of formats that ask for other integers than 8 bits -> options of `prunekit quantize`.
_INTEGERS = {"int4": ("--bits", "4"), "int16": ("--activation-bits", "16"), "16x8": ("--activation-bits", "16")}


@click.command()
@click.argument("model")
@click.option(
    "-o", "--output", metavar="DIR|FILE", required=True, help="A folder, or NAME.tflite or NAME.keras for one format."
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="FORMAT",
    help=f"{words(ExportFormat)}. May be repeated. May be left out for a file: its ending says keras or litert.",
)
@data_options("Examples on which files and model are compared")
@examples_option
@click.option("--name", metavar="NAME", show_default="that of MODEL", help="Name of the files in DIR, without ending.")
@click.option("--batch-size", type=AtLeast(1), help="Fixes the batch size of LiteRT files.")
@force_option
@json_option
def export(model: str, output: str, formats: tuple[str, ...], force: bool, as_json: bool, **options: Any) -> int:
    """Write a model in other formats, for LiteRT or for Keras.

    MODEL is a .keras file; it is not changed. Each file is run and compared with the model before it is kept; without
    --data, on random numbers. The exit code is 1 if a file was not written. Files that compute with integers need data
    for their ranges: `prunekit quantize MODEL --data DATA -o NAME.tflite`."""
    _check_options(output, formats, options)
    check_model(model)
    load_keras_quietly()
    from prunekit.operations.export import checked_formats, ending_of, format_of_file
    from prunekit.recipe.start.named_export import Examples, export_named

    target = Path(output)
    is_file = target.suffix in _FILES
    chosen = checked_formats(formats or [format_of_file(target)], _to_integers(model, target, formats, options))
    name = options["name"] or Path(model).stem
    folder = target.parent if is_file else target
    written = [target] if is_file else [folder / f"{name}{ending_of(one)}" for one in chosen]
    for one in written:
        check_distinct((model, "MODEL"), (str(one), "-o"))
        check_new(one, force)
    examples = Examples(options["data"], options["label"], options["examples"])
    with noting_new_folder(folder):
        rows = export_named(model, examples, target, chosen, name, options["batch_size"])
    if as_json:
        print_json({"path": output, "files": [vars(row) for row in rows]})
    else:
        _show(rows, output, examples)
    return 0 if all(row.status == "ok" for row in rows) else 1


def _check_options(output: str, formats: tuple[str, ...], options: dict[str, Any]) -> None:
    """Raises a usage error for options that do not fit a folder, or a file."""
    suffix = Path(output).suffix
    if options["label"] is not None and options["data"] is None:
        raise click.UsageError("--label needs --data.")
    if suffix in _FILES and not Path(output).is_dir():
        if len(formats) > 1 or options["name"] is not None:
            given = "--name" if options["name"] is not None else f"{len(formats)} formats"
            raise click.UsageError(f"{output} names one file. Received: {given}. Pass the folder as -o.")
        if formats and (formats[0] == "keras") != (suffix == ".keras"):
            raise click.UsageError(f"{output} is no file of the format {formats[0]}. Leave --format out, or rename it.")
        return
    if not formats:
        raise click.UsageError(
            "a folder needs --format, such as --format litert; a file ends with .tflite or .keras. Received: "
            f"-o {output}."
        )
    if Path(output).is_file():
        raise click.UsageError(f"-o takes a folder, or the name of a .tflite or .keras file. Received: {output!r}.")
    check_writable(output, folder=True)


def _to_integers(model: str, target: Path, formats: tuple[str, ...], options: dict[str, Any]) -> str:
    """Returns the answer to a format of integers: the command that writes such a file."""
    file = target if target.suffix == ".tflite" else target / f"{Path(model).stem}.tflite"
    bits = next((words for part, words in _INTEGERS.items() if any(part in name.lower() for name in formats)), ())
    label = [] if options["label"] is None else ["--label", options["label"]]
    data = ["--data", options["data"] or "DATA", *label]
    return f"{NEEDS_DATA} {shlex.join(['prunekit', 'quantize', model, *data, '-o', str(file), *bits])}."


def _show(rows: Any, output: str, examples: Any) -> None:
    from prunekit.delivery.reports.report_sections import export_section
    from prunekit.delivery.reports.terminal_report import print_section

    print_section(export_section(rows), console())
    if examples.data is None:
        click.echo("note: files and model were compared on random numbers: no --data.", err=True)
    for row in rows:
        if row.status != "ok":
            click.echo(f"error: {row.format} {row.status}: {row.note}", err=True)
    written = [row.file for row in rows if row.file is not None]
    if written:
        place = Path(output).parent if Path(output).name in written else Path(output)
        click.echo(f"\nWritten to {', '.join(str(place / name) for name in written)}")
