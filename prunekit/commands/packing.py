"""The commands pack and unpack: a LiteRT or Keras file in fewer bytes, and back.

Keras is imported inside the commands: --help starts fast.
"""

from pathlib import Path

import click

from prunekit.commands.files import check_distinct, force_option
from prunekit.commands.output import check_new, note_new_folder, print_json, print_sections
from prunekit.options import json_option
from prunekit.terminal import load_keras_quietly

_FILES = (".tflite", ".keras")
# Bytes of a file up to which all compressors are tried beside.
_COMPARED = 8_000_000


@click.command()
@click.argument("model")
@click.option("-o", "--output", metavar="NEW.pack", required=True, help="The file to write.")
@force_option
@json_option
def pack(model: str, output: str, force: bool, as_json: bool) -> int:
    """Write a file in fewer bytes, for downloads.

    MODEL is a .tflite or .keras file; it is not changed. `prunekit unpack` gives a .tflite file back byte by byte, and
    of a .keras file equal weights, bit by bit, and an equal configuration. The sizes after gzip, xz, zstd and brotli
    (the last two where they are installed) are printed beside; of files above 8 MB the size after gzip alone."""
    _check(model, output, force, "MODEL", f"a {' or '.join(_FILES)} file")
    if Path(output).suffix in _FILES:
        raise click.UsageError(f"-o names a packed file, such as small.pack. Received: {output!r}.")
    load_keras_quietly()
    from prunekit.delivery.packing.pack_report import COMPRESSORS
    from prunekit.operations.pack import pack as pack_file

    names = list(COMPRESSORS)
    report = pack_file(model, output, compare=names if Path(model).stat().st_size <= _COMPARED else names[:1])
    if as_json:
        print_json({"path": output, "report": report.to_dict()})
        return 0
    print_sections(report)
    click.echo(f"\n{report.verdict()} Written to {output}")
    return 0


@click.command()
@click.argument("packed")
@click.option("-o", "--output", metavar="NEW.tflite|NEW.keras", required=True, help="The file to write.")
@force_option
@json_option
def unpack(packed: str, output: str, force: bool, as_json: bool) -> int:
    """Restore the file that was packed.

    PACKED is a file that `prunekit pack` wrote; its checksum is compared before anything is written."""
    _check(packed, output, force, "PACKED", "a packed file")
    load_keras_quietly()
    from prunekit.operations.pack import unpack as unpack_file

    size = unpack_file(packed, output).stat().st_size
    if as_json:
        print_json({"path": output, "bytes": size})
    else:
        click.echo(f"Written to {output} ({size:,} bytes)")
    return 0


def _check(file: str, output: str, force: bool, argument: str, kind: str) -> None:
    if Path(file).is_dir():
        raise click.UsageError(f"{argument} takes the name of {kind}. Received: the folder {file!r}.")
    if not Path(file).is_file():
        raise click.UsageError(f"{file}: no such file.")
    check_distinct((file, argument), (output, "-o"))
    check_new(output, force)
    note_new_folder(Path(output))
