"""Commands that write a smaller model: prune, shrink, simplify, remove-blocks.

Keras and its backend are imported inside the commands: --help starts fast.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from prunekit.commands.output import print_json, print_sections
from prunekit.options import input_shape_option, json_option
from prunekit.terminal import console, load_keras_quietly

_Command = Callable[..., Any]


def _with_options(*options: _Command) -> Callable[[_Command], _Command]:
    """Returns a decorator that adds options, in this order."""

    def decorated(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


_output_option = click.option("-o", "--output", metavar="NEW.keras", required=True, help="The file to write.")
_force_option = click.option("--force", is_flag=True, help="Replace an existing file.")


def _examples_option(default: int) -> _Command:
    text = f"Examples to read of --data.  [default: {default}]"
    return click.option("--examples", type=click.IntRange(1), default=default, help=text)


def _pattern_options(verb: str, matched: str) -> Callable[[_Command], _Command]:
    """Returns a decorator with --include and --exclude.

    Args:
        verb: What the command does, in help texts.
        matched: What the patterns match.
    """
    return _with_options(
        click.option("--include", multiple=True, metavar="PATTERN", help=f"{matched} to {verb}. May be repeated."),
        click.option("--exclude", multiple=True, metavar="PATTERN", help=f"{matched} to leave. May be repeated."),
    )


def _options_of_a_removal(verb: str, matched: str) -> Callable[[_Command], _Command]:
    """Returns a decorator with the options of commands that remove weights and repair the others."""
    return _with_options(
        _output_option,
        click.option(
            "--data", metavar="DATA", help="Training examples: an .npz file or a saved data set. Repairs the model."
        ),
        _examples_option(1024),
        click.option(
            "--repair", type=click.Choice(["weights", "outputs", "none"]), help="With --data.  [default: weights]"
        ),
        _pattern_options(verb, matched),
        _force_option,
        json_option,
    )


@click.command()
@click.argument("model")
@click.option("--sparsity", type=float, required=True, help="Fraction of the weights to remove, in [0, 1).")
@click.option(
    "--criterion",
    default="magnitude",
    help="magnitude, l2, random, synflow, geometric_median ...  [default: magnitude]",
)
@click.option(
    "--pattern", default="unstructured", help="unstructured, 2:4, block:4x1 or channel.  [default: unstructured]"
)
@click.option(
    "--allocation", default="uniform", help="uniform, global, erk, lamp; layer_error with --data.  [default: uniform]"
)
@_options_of_a_removal("prune", "Layers and weights")
def prune(model: str, sparsity: float, output: str, force: bool, as_json: bool, **options: Any) -> int:
    """Prune a model once, without training.

    MODEL is a .keras file; it is not changed. NEW.keras holds the pruned model without its optimizer. With --data the
    kept weights are fitted to what each layer computed before. To prune while training, to export, or to read other
    kinds of data, use a recipe: prunekit init."""
    _check_files(model, output, force)
    found, data = _loaded(model, options)
    from prunekit.anatomy.reports import layer_error_section
    from prunekit.delivery.terminal_report import inspect_table, print_section
    from prunekit.techniques.pruning.one_shot import prune as prune_model

    with _progress("Pruned", data is not None) as progress:
        done = prune_model(found, sparsity, data, progress=progress, **options)
    _write(found, Path(output))
    if as_json:
        print_json({"path": output, "report": done.to_dict()})
        return 0
    console().print(inspect_table(done))
    if done.layer_errors:
        print_section(layer_error_section(done.layer_errors), console())
    for note in done.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"Sparsity {done.target_sparsity:.4f} in {len(done.targets)} weights. Written to {output}")
    return 0


_TARGETS = ("channels", "parameters", "macs", "bytes", "latency")
# Removes the channels whose kernels are zero.
_NONZERO = "nonzero"


class _Channels(click.ParamType):
    """The share of the channels to keep, or "nonzero"."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        """Returns the number, or the word."""
        if value == _NONZERO or isinstance(value, float):
            return value
        try:
            return float(value)
        except ValueError:
            self.fail(f"expected a number such as 0.5, or {_NONZERO}. Received: {value!r}.", param, ctx)


@click.command()
@click.argument("model")
@click.option(
    "--channels",
    type=_Channels(),
    metavar="FLOAT|nonzero",
    help="Fraction of the removable channels to keep, in (0, 1]; nonzero removes those whose kernels are zero.",
)
@click.option("--parameters", type=float, help="Fraction of the parameters to keep.")
@click.option("--macs", type=float, help="Fraction of the multiply-accumulates to keep.")
@click.option("--bytes", type=float, help="Fraction of the bytes of the LiteRT file (float32) to keep.")
@click.option("--latency", type=float, help="Fraction of the file's latency on this machine (one thread) to keep.")
@click.option(
    "--criterion", default="magnitude", help="As for prune; mean_activation ... with --data.  [default: magnitude]"
)
@click.option("--allocation", default="uniform", help="uniform, alike or global.  [default: uniform]")
@click.option(
    "--multiple",
    type=click.IntRange(1),
    default=1,
    help="Rounds the kept channels of each group up to a multiple.  [default: 1]",
)
@click.option(
    "--approximate",
    type=click.Choice(["layer_normalization"]),
    multiple=True,
    help="Also remove channels where that is an approximation. May be repeated.",
)
@input_shape_option
@_options_of_a_removal("shrink", "Layers")
def shrink(model: str, output: str, force: bool, as_json: bool, **options: Any) -> int:
    """Remove channels: a smaller, faster model.

    MODEL is a .keras file; it is not changed. Exactly one of --channels, --parameters, --macs, --bytes and --latency
    says how much is kept; for the last two, LiteRT files of several smaller models are made and measured. NEW.keras
    holds the smaller model without its optimizer. With --data the kept weights are fitted to what each layer computed
    before. `prunekit inspect --groups` shows which channels can be removed."""
    targets = {name: options.pop(name) for name in _TARGETS}
    asked = {name: value for name, value in targets.items() if value is not None}
    if len(asked) != 1:
        received = " and ".join(f"--{name}" for name in asked) or "none"
        listed = ", ".join(f"--{name}" for name in _TARGETS)
        raise click.UsageError(f"Pass exactly one of {listed}. Received: {received}.")
    nonzero = asked.get("channels") == _NONZERO
    if nonzero:
        _check_nonzero(options)
    _check_files(model, output, force)
    found, data = _loaded(model, options)
    if nonzero:
        from prunekit.techniques.shrink.shrinking import remove_zero_channels

        kept = {name: options[name] for name in ("multiple", "include", "exclude", "approximate")}
        smaller, report = remove_zero_channels(found, data=data, **kept)
    else:
        from prunekit.delivery.shrinking import shrink as shrink_model

        shown = data is not None or bool({"bytes", "latency"} & asked.keys())
        with _progress("Shrinking", shown) as progress:
            smaller, report = shrink_model(found, data=data, progress=progress, **asked, **options)
    return _written(smaller, report, output, as_json)


@click.command()
@click.argument("model")
@_output_option
@_force_option
@json_option
def simplify(model: str, output: str, force: bool, as_json: bool) -> int:
    """Remove what inference does not need.

    The outputs stay equal. MODEL is a .keras file; it is not changed. NEW.keras holds the simpler model without its
    optimizer: batch normalization is folded into the layers beside it, dropout and other identities are dropped,
    duplicates merged."""
    _check_files(model, output, force)
    load_keras_quietly()
    from prunekit.anatomy.model_files import load_model
    from prunekit.techniques.shrink.simplifying import simplify as simplify_model

    return _written(*simplify_model(load_model(model, compile=False)), output, as_json)


@click.command()
@click.argument("model")
@_output_option
@click.option("--number", type=click.IntRange(1), default=1, help="How many blocks to remove.  [default: 1]")
@click.option("--data", metavar="DATA", required=True, help="Training examples: an .npz file or a saved data set.")
@_examples_option(256)
@_pattern_options("remove", "Blocks, or layers in them,")
@_force_option
@json_option
def remove_blocks(
    model: str, output: str, number: int, data: str, examples: int, force: bool, as_json: bool, **options: Any
) -> int:
    """Remove the blocks that matter least.

    A block is a residual branch or a run of layers; those go that change the outputs least. MODEL is a .keras file; it
    is not changed. In every round each block is bypassed on the data in turn. NEW.keras holds the model with fewer
    layers, without its optimizer; train it again afterwards."""
    _check_files(model, output, force)
    load_keras_quietly()
    from prunekit.anatomy.model_files import load_model
    from prunekit.techniques.shrink.block_removal import remove_blocks as remove_blocks_of

    found = load_model(model, compile=False)
    with _progress("Ranking", shown=True) as progress:
        smaller, report = remove_blocks_of(found, number, _examples(data, examples), progress=progress, **options)
    return _written(smaller, report, output, as_json)


def _written(smaller: Any, report: Any, output: str, as_json: bool) -> int:
    """Writes a smaller model, and prints its report."""
    _write(smaller, Path(output))
    if as_json:
        print_json({"path": output, "report": report.to_dict()})
        return 0
    print_sections(report)
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"\n{report.verdict()} Written to {output}")
    return 0


def _check_nonzero(options: Mapping[str, Any]) -> None:
    defaults = {"criterion": "magnitude", "allocation": "uniform", "repair": None}
    given = [f"--{name}" for name, default in defaults.items() if options[name] != default]
    given += ["--input-shape"] if options["inputs"] else []
    if given:
        raise click.UsageError(
            f"--channels {_NONZERO} removes the channels whose kernels are zero. Received: {', '.join(given)}, which "
            "would have no effect."
        )


def _loaded(model: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the model, not compiled, and training examples or None; takes the options of the data out."""
    name, examples = options.pop("data"), options.pop("examples")
    if options["repair"] is not None and name is None:
        raise click.UsageError("--repair needs --data.")
    load_keras_quietly()
    from prunekit.anatomy.model_files import load_model

    return load_model(model, compile=False), None if name is None else _examples(name, examples)


def _write(model: Any, target: Path) -> None:
    """Writes a .keras file; an interruption leaves no part of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Keras chooses the format by the ending of the name.
    partial = target.with_name(f".unfinished-{target.name}")
    try:
        model.save(partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _examples(name: str, count: int) -> Any:
    """Returns training examples, drawn at random with seed 0."""
    from prunekit.recipe.data import training_examples
    from prunekit.recipe.data_source import DataSource

    if not (name.endswith(".npz") or Path(name).is_dir()):
        raise click.UsageError(f"--data takes an .npz file or a folder of tf.data.Dataset.save. Received: {name!r}.")
    path = os.path.abspath(name)
    source = DataSource(npz=path) if name.endswith(".npz") else DataSource(tfds_saved=path)
    return training_examples(source, count)


@contextlib.contextmanager
def _progress(verb: str, shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function that shows how much is done, if it is to be shown and standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    errors = Console(stderr=True)
    columns = (TextColumn("{task.fields[verb]}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=errors, transient=True, disable=not (shown and errors.is_terminal)) as bar:
        task = bar.add_task("", total=None, verb=verb)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)


def _check_files(model: str, output: str, force: bool) -> None:
    for option, path in (("MODEL", model), ("-o", output)):
        if Path(path).is_dir():
            raise click.UsageError(f"{option} takes the name of a .keras file. Received: the folder {path!r}.")
    if not Path(model).is_file():
        raise click.UsageError(f"{model}: no such file.")
    if not output.endswith(".keras"):
        raise click.UsageError(f"-o takes the name of a .keras file. Received: {output!r}.")
    if Path(output).exists() and not force:
        raise click.UsageError(f"{output} exists already. Pass --force to replace it.")
    folder = next(parent for parent in Path(output).absolute().parents if parent.exists())
    if not folder.is_dir():
        raise click.UsageError(f"{output} cannot be written: {folder} is a file, not a folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise click.UsageError(f"{output} cannot be written: no permission to write in {folder}.")
