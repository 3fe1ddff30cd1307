"""The command cluster: few different values for each weight.

Keras and its backend are imported inside the command: --help starts fast.
"""

from typing import Any, get_args

import click

from prunekit.commands.files import (
    check_files,
    data_options,
    examples_option,
    force_option,
    loaded,
    memory_option,
    misfits_option,
    other_option,
    other_options,
    pattern_options,
    showing_progress,
    write_and_report,
)
from prunekit.options import AtLeast, Parsed, json_option, words
from prunekit.sparsity.shorthands import Clustering, Granularity


def _granularity(text: str) -> str | int:
    """Returns a word of the option or a number of channels."""
    return int(text) if text.isdigit() else text


@click.command()
@click.argument("model")
@click.option("-o", "--output", metavar="NEW.keras", required=True, help="The file to write.")
@click.option("--clusters", type=AtLeast(2, 256), default=16, help="Most values of a weight, zero included.")
@click.option(
    "--granularity",
    type=Parsed(_granularity),
    metavar="NAME|N",
    default="tensor",
    help=f"Which entries of a weight share their values: {words(Granularity)}, or so many neighbouring channels.",
)
@data_options("Training examples, on which values are fitted to what each layer computes")
@examples_option
@click.option(
    "--method",
    type=click.Choice(get_args(Clustering)),
    default="auto",
    help="kmeans takes the nearest values; gptq lets the other weights of a layer make up for the error.",
)
@misfits_option("skip", "Weights that would not become smaller: skip leaves them, error refuses MODEL")
@other_option("pk.cluster", "correct_biases=false")
@pattern_options("cluster", "Layers and weights")
@memory_option
@force_option
@json_option
def cluster(model: str, output: str, clusters: int, force: bool, as_json: bool, **options: Any) -> int:
    """Give each weight few different values.

    MODEL is a .keras file; it is not changed. NEW.keras holds the clustered model without its optimizer: plain values,
    which make it smaller once it is compressed, and where the runtime reads indices and tables of values. Zeros stay
    zero."""
    others = other_options(options)
    check_files(model, output, force)
    found, data = loaded(model, options)
    from prunekit.operations.cluster import cluster as cluster_model

    with showing_progress("Clustered") as progress:
        done = cluster_model(found, clusters, data, progress=progress, **options, **others)
    return write_and_report(found, done, output, as_json)
