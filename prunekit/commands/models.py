"""Commands on models and on this machine: inspect, convert, doctor.

Keras and its backend are imported inside the commands: --help starts fast.
"""

import contextlib
from pathlib import Path
from typing import Any

import click

from prunekit.commands.files import check_model
from prunekit.commands.output import noting_new_folder, print_json, print_sections
from prunekit.options import input_shape_option, json_option
from prunekit.terminal import console, load_keras_quietly


@click.command()
@click.argument("model")
@click.option("--groups", is_flag=True, help="Show the groups of channels that `prunekit shrink` can remove.")
@input_shape_option
@json_option
def inspect(model: str, groups: bool, inputs: Any, as_json: bool) -> int:
    """Show the weights of a model, or its groups of channels.

    MODEL is a .keras file. The table has zeros, pattern, multiplications and bytes of each weight. The multiplications
    of a model whose inputs have no fixed size need --input-shape. With --groups, one table has the channels that can
    be removed together, with the weights that shrink, and another one the channels that stay, with the reasons."""
    check_model(model)
    if groups and inputs is not None:
        raise click.UsageError("--groups reads no example inputs. Leave out --input-shape.")
    load_keras_quietly()
    from prunekit.anatomy.files.model_files import load_model

    # Not compiled: a custom loss or metric must not prevent the inspection.
    found = load_model(model, compile=False)
    return _show_groups(found, as_json) if groups else _show_weights(found, inputs, as_json)


def _show_weights(model: Any, inputs: Any, as_json: bool) -> int:
    from prunekit.anatomy.cost.inspection import inspect as inspect_model
    from prunekit.delivery.reports.terminal_report import inspect_table

    report = inspect_model(model, inputs=inputs)
    if as_json:
        print_json(report.to_dict())
        return 0
    console().print(inspect_table(report))
    for note in report.notes:
        click.echo(f"note: {note}")
    return 0


def _show_groups(model: Any, as_json: bool) -> int:
    from prunekit.techniques.shrink.channels.groups_report import channel_groups

    report = channel_groups(model)
    if as_json:
        print_json(report.to_dict())
        return 0
    print_sections(report)
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

    with noting_new_folder(Path(new).parent):
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
