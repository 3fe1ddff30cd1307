"""The command that answers one question: search, the smallest or fastest file for a drop.

Keras and its backend are imported inside the command: --help starts fast.
"""

from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from prunekit.commands.files import check_model, data_options, memory_option
from prunekit.commands.output import keeping_scan, print_json, print_sections, step_lines
from prunekit.options import AtLeast, Parsed, json_option
from prunekit.sparsity.arguments import duration, non_negative, number_of_bytes, time_or_share
from prunekit.sparsity.shorthands import SearchProfile, SearchTarget, SearchTechnique, SearchWorkers
from prunekit.terminal import load_keras_quietly


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _drop(text: str) -> float:
    value = _number_or_text(text)
    if isinstance(value, str):
        raise ValueError(f"--drop is a number in the unit of the metric: 0.005 is half a point. Received: {text!r}.")
    return non_negative("--drop", value)


def _latency(text: str) -> float | str:
    """Returns a share as a number, and a time as its text."""
    value = _number_or_text(text)
    time_or_share("--latency", value)
    return value


def _arena(text: str) -> float:
    """Returns bytes; without a unit, too: those of microcontrollers are few."""
    return number_of_bytes("--arena", _number_or_text(text))


@click.command()
@click.argument("model")
@data_options("Examples to choose and to judge by, best some that MODEL was not trained on", required=True)
@click.option("--drop", type=Parsed(_drop), metavar="FLOAT", help="How much worse the metric may become: 0.005.")
@click.option(
    "--bytes",
    type=Parsed(partial(number_of_bytes, "--bytes")),
    metavar="BYTES",
    help="Most bytes of the file, such as 200kB.",
)
@click.option(
    "--latency",
    type=Parsed(_latency),
    metavar="TIME",
    help="Most time of a call on this machine: 2ms, or a share of that of the file in float32: 0.5.",
)
@click.option(
    "--arena",
    type=Parsed(_arena),
    metavar="BYTES",
    help="Most memory for activations, such as 64kB, as LiteRT for Microcontrollers plans it.",
)
@click.option(
    "--profile",
    type=click.Choice(get_args(SearchProfile)),
    default="small",
    help="What is minimised within the drop: bytes, latency (fast), or both.",
)
@click.option(
    "--target",
    type=click.Choice(get_args(SearchTarget)),
    default="litert",
    help="What is counted: the LiteRT file, its packed form, in which zeros count, or one of integers throughout.",
)
@click.option(
    "--techniques",
    type=Parsed(lambda text: text if text == "all" else tuple(text.split(","))),
    metavar="NAMES",
    default="all",
    help=f"What may be chosen: all, or some of {','.join(get_args(SearchTechnique))}.",
)
@click.option(
    "--examples",
    type=AtLeast(1),
    default=5000,
    help="How many examples are read, drawn at random from the training part of --data.",
)
@click.option(
    "--epochs",
    type=AtLeast(1),
    help="Train bolder files so many epochs, on the other examples of --data.  [default: no training]",
)
@memory_option
@click.option(
    "--workers",
    type=click.Choice(get_args(SearchWorkers)),
    help="Who measures the levels: the nodes of a Ray cluster.  [default: this process]",
)
@click.option(
    "--time",
    type=Parsed(partial(duration, "--time")),
    metavar="TIME",
    help="Most time of the search, such as 20min.  [default: no limit]",
)
@click.option("-o", "--output", metavar="DIR", show_default="runs/MODEL-search", help="Folder of the search.")
@json_option
def search(model: str, data: str, label: str | None, as_json: bool, **options: Any) -> int:
    """Find the smallest or fastest file that loses at most a drop.

    MODEL is a .keras file; it is not changed. Channels, ranks, bits and zeros are chosen together, from measurements of
    each; files are made and run until one holds the drop on held-out examples. An interrupted search
    continues when the command is run again, and another question begins with its measurements."""
    check_model(model)
    if all(options[name] is None for name in ("drop", "bytes", "latency", "arena")):
        raise click.UsageError(
            "Missing option '--drop', '--bytes', '--latency' or '--arena': how much may be lost, or how small or fast "
            "the file must be."
        )
    folder = options.pop("output")
    folder = str(Path("runs", f"{Path(model).stem}-search")) if folder is None else folder
    load_keras_quietly()
    from prunekit.recipe.start.named_scan import search_named
    from prunekit.searching.search_run import TABLES

    with keeping_scan(Path(folder, TABLES[options["target"]])):
        found = search_named(model, data, label, progress=step_lines(), output=folder, **options)
    if as_json:
        print_json(found.report.to_dict())
        return 0
    print_sections(found.report)
    click.echo(f"\n{found.report.verdict()} Written to {folder}")
    return 0
