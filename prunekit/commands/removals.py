"""Commands that write a smaller model: prune, shrink, factorize, simplify, remove-blocks.

Keras and its backend are imported inside the commands: --help starts fast.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from prunekit.commands.files import (
    Command,
    check_files,
    criterion_option,
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
    with_options,
    write_and_report,
    write_model,
)
from prunekit.commands.output import print_json
from prunekit.options import AtLeast, Parsed, input_shape_option, json_option, words
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.shorthands import (
    ALLOCATIONS,
    MEASURES,
    NONZERO,
    TARGETS,
    Approximation,
    ChannelAllocation,
    LowRankForm,
    Repair,
)
from prunekit.terminal import console, load_keras_quietly

# What stands before the file of a scan, as an allocation.
_SCAN = "sensitivity:"
_output_option = click.option("-o", "--output", metavar="NEW.keras", required=True, help="The file to write.")


def _options_of_a_removal(verb: str, matched: str) -> Callable[[Command], Command]:
    """Returns a decorator with the options of commands that remove weights and repair the others."""
    return with_options(
        _output_option,
        data_options("Training examples, on which weights are chosen and repaired"),
        examples_option,
        click.option(
            "--repair",
            type=click.Choice(get_args(Repair)),
            show_default="weights with --data or --criterion auto, otherwise none",
            help="How the rest makes up for what is removed: weights fits the kept weights of each layer to its "
            "former outputs, outputs a scale and a bias of each output, none nothing.",
        ),
        pattern_options(verb, matched),
        memory_option,
        force_option,
        json_option,
    )


@click.command()
@click.argument("model")
@click.option("--sparsity", type=float, required=True, help="Fraction of the weights to remove, in [0, 1).")
@criterion_option(once=False)
@pattern_option
@click.option(
    "--allocation",
    default="auto",
    metavar="NAME",
    help=f"How the sparsity is shared between weights: {words(ALLOCATIONS)}. {_SCAN}FILE reads the "
    "sensitivity.json that `prunekit sensitivity` wrote.",
)
@misfits_option("error", "Weights that the pattern does not fit: error refuses MODEL, skip leaves them out")
@other_option("pk.prune", "keep_one=false")
@_options_of_a_removal("prune", "Layers and weights")
def prune(model: str, sparsity: float, output: str, force: bool, as_json: bool, **options: Any) -> int:
    """Prune a model once, without training.

    MODEL is a .keras file; it is not changed. NEW.keras holds the pruned model without its optimizer. The kept weights
    are fitted to what each layer computed before, on --data or else on random signals. To prune while training, to
    export, or to read other kinds of data, use a recipe: `prunekit init`."""
    others = other_options(options)
    check_files(model, output, force)
    found, data = loaded(model, options)
    if options["allocation"].startswith(_SCAN):
        options["allocation"] = ALLOCATIONS["sensitivity"].load()(options["allocation"].removeprefix(_SCAN))
    from prunekit.anatomy.records.reports import choices_sections, layer_error_section
    from prunekit.delivery.reports.terminal_report import inspect_table, print_section
    from prunekit.operations.prune import prune as prune_model

    with showing_progress("Pruned") as progress:
        done = prune_model(found, sparsity, data, progress=progress, **options, **others)
    write_model(found, Path(output))
    if as_json:
        print_json({"path": output, "report": done.to_dict()})
        return 0
    console().print(inspect_table(done))
    sections = [*choices_sections(done.choices), *([] if done.damage is None else [done.damage.section()])]
    if done.layer_errors:
        sections.append(layer_error_section(done.layer_errors))
    for section in sections:
        print_section(section, console())
    for note in done.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"\nSparsity {done.target_sparsity:.4f} in {len(done.targets)} weights. Written to {output}")
    return 0


def _asked(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Takes the options that say how small the model becomes out of all options; returns the one that is given."""
    asked = {name: value for name in names if (value := options.pop(name)) is not None}
    if len(asked) != 1:
        received = " and ".join(f"--{name}" for name in asked) or "none"
        listed = ", ".join(f"--{name}" for name in names)
        raise click.UsageError(f"Pass exactly one of {listed}. Received: {received}.")
    return asked


def _channels(text: str) -> float | str:
    """Returns the share of the channels to keep, or "nonzero"."""
    try:
        return text if text == NONZERO else float(text)
    except ValueError:
        raise ValueError(f"expected a number such as 0.5, or {NONZERO}. Received: {text!r}.") from None


@click.command()
@click.argument("model")
@click.option(
    "--channels",
    type=Parsed(_channels),
    metavar="FLOAT|nonzero",
    help="Fraction of the removable channels to keep, in (0, 1]; nonzero removes those whose kernels are zero.",
)
@click.option("--parameters", type=float, help="Fraction of the parameters to keep.")
@click.option("--macs", type=float, help="Fraction of the multiply-accumulates to keep.")
@click.option("--bytes", type=float, help="Fraction of the bytes of the LiteRT file (float32) to keep.")
@click.option("--latency", type=float, help="Fraction of the file's latency on this machine (one thread) to keep.")
@criterion_option(once=True)
@click.option(
    "--allocation",
    default="auto",
    metavar="NAME",
    help=f"How the removal is shared between layers: auto, {words(ChannelAllocation)}.",
)
@click.option(
    "--multiple",
    type=AtLeast(1),
    default=1,
    help="Round the kept channels of each layer up to a multiple of N.",
)
@click.option(
    "--approximate",
    type=click.Choice(get_args(Approximation)),
    multiple=True,
    help="Also remove channels of layer normalizations, which changes their outputs slightly.",
)
@input_shape_option
@other_option("pk.shrink", "minimum=4")
@_options_of_a_removal("shrink", "Layers")
def shrink(model: str, output: str, force: bool, as_json: bool, **options: Any) -> int:
    """Remove channels: a smaller, faster model.

    MODEL is a .keras file; it is not changed. Exactly one of --channels, --parameters, --macs, --bytes and --latency
    says how much is kept; for the last two, LiteRT files of several smaller models are made and measured. NEW.keras
    holds the smaller model without its optimizer. The kept weights are fitted to what each layer computed before, on
    --data or else on random signals. `prunekit inspect --groups` shows which channels can be removed."""
    others = other_options(options)
    asked = _asked(options, MEASURES)
    nonzero = asked.get("channels") == NONZERO
    if nonzero:
        _check_nonzero(options)
    check_files(model, output, force)
    found, data = loaded(model, options)
    if nonzero:
        options = {name: options[name] for name in ("multiple", "include", "exclude", "approximate")}
    from prunekit.operations.shrink import shrink as shrink_model

    with showing_progress("Shrinking") as progress:
        smaller, report = shrink_model(found, data=data, progress=progress, **asked, **options, **others)
    return write_and_report(smaller, report, output, as_json)


def _rank(text: str) -> int | dict[str, int | str]:
    """Returns a rank, or ranks by patterns: "head=16,block_*=full"."""
    if "=" not in text:
        return int(text)
    pairs = [one.partition("=") for one in text.split(",")]
    return {pattern.strip(): int(rank) if rank.strip().isdigit() else rank.strip() for pattern, _, rank in pairs}


@click.command()
@click.argument("model")
@click.option("--parameters", type=float, help="Fraction of the parameters to keep.")
@click.option("--macs", type=float, help="Fraction of the multiply-accumulates to keep.")
@click.option("--bytes", type=float, help="Fraction of the bytes of the LiteRT file (float32) to keep.")
@click.option("--latency", type=float, help="Fraction of the file's latency on this machine (one thread) to keep.")
@click.option("--rank", type=Parsed(_rank), metavar="N|PATTERN=N,...", help="Values between the two layers.")
@click.option("--energy", type=float, help="Fraction of the squared outputs of each layer to keep, such as 0.99.")
@click.option(
    "--form",
    type=click.Choice(get_args(LowRankForm)),
    default="auto",
    show_default=True,
    help="Convolutions: k x k to few channels, then 1 x 1 (channels); k x 1, then 1 x k (separable); 1 x 1, k x k, "
    "1 x 1 (tucker); or the least error at its cost for each layer.",
)
@_output_option
@data_options("Training examples, on which factors are fitted to what each layer computes")
@examples_option
@other_option("pk.factorize", "correct_biases=false")
@pattern_options("factorize", "Layers and weights")
@memory_option
@force_option
@json_option
def factorize(model: str, output: str, force: bool, as_json: bool, **options: Any) -> int:
    """Replace layers by two or three of low rank.

    MODEL is a .keras file; it is not changed. Exactly one of --parameters, --macs, --bytes, --latency, --rank and
    --energy says how small the layers become. NEW.keras holds the smaller model without its optimizer. What would not
    become smaller stays."""
    others = other_options(options)
    asked = _asked(options, TARGETS)
    check_files(model, output, force)
    found, data = loaded(model, options)
    from prunekit.operations.factorize import factorize as factorize_model

    with showing_progress("Factorized") as progress:
        smaller, report = factorize_model(found, data=data, progress=progress, **asked, **options, **others)
    return write_and_report(smaller, report, output, as_json)


@click.command()
@click.argument("model")
@_output_option
@force_option
@json_option
def simplify(model: str, output: str, force: bool, as_json: bool) -> int:
    """Remove what inference does not need.

    The outputs stay equal. MODEL is a .keras file; it is not changed. NEW.keras holds the simpler model without its
    optimizer: batch normalization is folded into the layers beside it, dropout and other identities are dropped,
    duplicates merged."""
    check_files(model, output, force)
    load_keras_quietly()
    from prunekit.anatomy.files.model_files import load_model
    from prunekit.operations.simplify import simplify as simplify_model

    return write_and_report(*simplify_model(load_model(model, compile=False)), output, as_json)


@click.command()
@click.argument("model")
@_output_option
@click.option("--blocks", type=AtLeast(1), default=1, help="How many blocks to remove.")
@data_options("Training examples, on which outputs are compared", required=True)
@examples_option
@pattern_options("remove", "Blocks, or layers in them,")
@force_option
@json_option
def remove_blocks(model: str, output: str, blocks: int, force: bool, as_json: bool, **options: Any) -> int:
    """Remove the blocks that matter least.

    A block is a residual branch or a run of layers; those go that change the outputs least. MODEL is a .keras file; it
    is not changed. In every round each block is bypassed on the data in turn. NEW.keras holds the model with fewer
    layers, without its optimizer; train it again afterwards."""
    check_files(model, output, force)
    found, data = loaded(model, options)
    from prunekit.operations.remove_blocks import remove_blocks as remove_blocks_of

    with showing_progress("Ranking") as progress:
        smaller, report = remove_blocks_of(found, blocks, data, progress=progress, **options)
    return write_and_report(smaller, report, output, as_json)


def _check_nonzero(options: Mapping[str, Any]) -> None:
    defaults = {"criterion": "auto", "allocation": "auto", "repair": None, "memory": MEMORY}
    given = [f"--{name}" for name, default in defaults.items() if options[name] != default]
    given += ["--input-shape"] if options["inputs"] else []
    if given:
        raise click.UsageError(
            f"--channels {NONZERO} removes the channels whose kernels are zero. Received: {', '.join(given)}, which "
            "would have no effect."
        )
