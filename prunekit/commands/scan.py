"""The command that measures which weights can be pruned, or stored with few bits: sensitivity.

Keras and its backend are imported inside the command: --help starts fast.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from prunekit.commands.files import (
    check_model,
    data_options,
    examples_option,
    memory_option,
    misfits_option,
    pattern_option,
    pattern_options,
)
from prunekit.commands.output import keeping_scan, print_json, step_lines
from prunekit.options import AtLeast, Parsed, json_option
from prunekit.terminal import console, load_keras_quietly


def _numbers(kind: Callable[[str], Any], examples: str) -> Parsed:
    """Returns the type of an option that is one number, or several with commas between them."""

    def read(text: str) -> tuple[Any, ...]:
        try:
            return tuple(map(kind, text.split(",")))
        except ValueError:
            raise ValueError(f"expected numbers such as {examples}. Received: {text!r}.") from None

    return Parsed(read)


@click.command()
@click.argument("model")
@data_options("Training examples to measure on", required=True)
@click.option(
    "--sparsity",
    type=_numbers(float, "0.5 or 0.5,0.8"),
    multiple=True,
    metavar="FRACTIONS",
    show_default="0.5,0.7,0.8,0.9,0.95",
    help="Sparsities to which each weight is pruned in turn. May be repeated.",
)
@click.option(
    "--bits",
    type=_numbers(int, "8 or 4,8"),
    multiple=True,
    metavar="NUMBERS",
    help="Round each weight in turn to so many bits, such as 4,8, instead of pruning. May be repeated.",
)
@click.option("--criterion", default="magnitude", metavar="NAME", help="Which weights go, as for prune.")
@pattern_option
@pattern_options("scan", "Layers and weights")
@misfits_option("error", "Weights that the pattern does not fit: error refuses MODEL, skip leaves them out")
@examples_option
@click.option("--batch-size", type=AtLeast(1), default=128, help="Examples per batch.")
@memory_option
@click.option("-o", "--output", metavar="DIR", show_default="runs/MODEL-sensitivity", help="Folder of the scan.")
@click.option("--force", is_flag=True, help="Replace a scan of another model, other data or other settings.")
@json_option
def sensitivity(model: str, data: str, label: str | None, as_json: bool, **options: Any) -> int:
    """Measure what pruning or rounding each weight costs.

    MODEL is a .keras file. One weight at a time is pruned, at each sparsity, or rounded, to each number of bits, and
    the metrics, the loss and the error of the model's outputs are measured on training examples; the model is not
    changed. An interrupted scan continues when the command is run again. `prunekit prune --allocation sensitivity:FILE`
    reads the scan's sensitivity.json."""
    check_model(model)
    load_keras_quietly()
    from prunekit.delivery.reports.terminal_report import print_section
    from prunekit.operations.sensitivity import PICTURE, TABLE
    from prunekit.recipe.start.named_scan import scan_named

    folder = options.pop("output")
    folder = str(Path("runs", f"{Path(model).stem}-sensitivity")) if folder is None else folder
    levels, bits = ([level for given in options.pop(name) for level in given] for name in ("sparsity", "bits"))
    settings = {**options, "sparsity": levels or None, "bits": bits or None}
    with keeping_scan(Path(folder, TABLE)):
        report = scan_named(model, data, label, progress=step_lines(), output=folder, **settings)
    if as_json:
        print_json(report.to_dict())
        return 0
    for section in report.sections():
        print_section(section, console())
    click.echo(f"\nWritten to {folder}; the picture is {folder}/{PICTURE}.")
    return 0
