"""Commands on models and on this machine: inspect, convert, doctor.

Keras and its backend are imported inside the commands: --help starts fast.
"""

import contextlib
from pathlib import Path

import click

from prunekit.commands.output import print_json
from prunekit.options import json_option
from prunekit.terminal import console, load_keras_quietly


@click.command()
@click.argument("model")
@json_option
def inspect(model: str, as_json: bool) -> int:
    """Show the weights of a model.

    MODEL is a .keras file. The table has zeros, pattern, multiplications and bytes of each weight."""
    if not Path(model).is_file():
        raise click.UsageError(f"{model}: no such file.")
    load_keras_quietly()
    from prunekit.anatomy.inspection import inspect as inspect_model
    from prunekit.anatomy.model_files import load_model

    # Not compiled: a custom loss or metric must not prevent the inspection.
    report = inspect_model(load_model(model, compile=False))
    if as_json:
        print_json(report.to_dict())
        return 0
    from prunekit.delivery.terminal_report import inspect_table

    console().print(inspect_table(report))
    return 0


@click.command()
@click.argument("old")
@click.argument("new", metavar="NEW.keras")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def convert(old: str, new: str, force: bool, as_json: bool) -> int:
    """Convert a tf_keras model to Keras 3.

    OLD is a .h5, .hdf5 or .keras file or a SavedModel folder. Wrappers of tensorflow-model-optimization are
    removed; their settings, and the parts that cannot be converted, are printed."""
    load_keras_quietly()
    from prunekit.interop.tfmot.conversion import convert as convert_model

    converted = convert_model(old, new, force=force)
    if as_json:
        print_json({"path": new, **converted.to_dict()})
    else:
        click.echo(f"{converted}\nWritten to {new}")
    return 0


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check which features run on this machine.

    Missing features are listed with a remedy. The exit code is 1 if models cannot be pruned and trained here."""
    # If Keras does not start, `examine` reports the reason.
    with contextlib.suppress(Exception):
        load_keras_quietly()
    from prunekit.doctor import examine, show_examination

    found = examine()
    if as_json:
        print_json(found.to_dict())
    else:
        show_examination(found, console())
    return 0 if found.ok else 1
