"""Commands on models and on this machine: inspect, prune, convert, doctor.

Keras and its backend are imported inside the commands: --help starts fast.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from prunekit.commands.output import print_json
from prunekit.options import input_shape_option, json_option
from prunekit.terminal import console, load_keras_quietly


@click.command()
@click.argument("model")
@input_shape_option
@json_option
def inspect(model: str, inputs: Any, as_json: bool) -> int:
    """Show the weights of a model.

    MODEL is a .keras file. The table has zeros, pattern, multiplications and bytes of each weight. The multiplications
    of a model whose inputs have no fixed size need --input-shape."""
    if not Path(model).is_file():
        raise click.UsageError(f"{model}: no such file.")
    load_keras_quietly()
    from prunekit.anatomy.inspection import inspect as inspect_model
    from prunekit.anatomy.model_files import load_model

    # Not compiled: a custom loss or metric must not prevent the inspection.
    report = inspect_model(load_model(model, compile=False), inputs=inputs)
    if as_json:
        print_json(report.to_dict())
        return 0
    from prunekit.delivery.terminal_report import inspect_table

    console().print(inspect_table(report))
    for note in report.notes:
        click.echo(f"note: {note}")
    return 0


@click.command()
@click.argument("model")
@click.option("--sparsity", type=float, required=True, help="Fraction of the weights to remove, in [0, 1).")
@click.option("-o", "--output", metavar="NEW.keras", required=True, help="The file to write.")
@click.option("--data", metavar="DATA", help="Training examples: an .npz file or a saved data set. Repairs the model.")
@click.option("--examples", type=click.IntRange(1), default=1024, help="Examples to read of --data.  [default: 1024]")
@click.option("--repair", type=click.Choice(["weights", "outputs", "none"]), help="With --data.  [default: weights]")
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
@click.option("--include", multiple=True, metavar="PATTERN", help="Layers and weights to prune. May be repeated.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Layers and weights to leave. May be repeated.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def prune(model: str, sparsity: float, output: str, force: bool, as_json: bool, **options: Any) -> int:
    """Prune a model once, without training.

    MODEL is a .keras file; it is not changed. NEW.keras holds the pruned model without its optimizer. With --data the
    kept weights are fitted to what each layer computed before. To prune while training, to export, or to read other
    kinds of data, use a recipe: prunekit init."""
    _check_files(model, output, force)
    name, examples, repair = (options.pop(key) for key in ("data", "examples", "repair"))
    if repair is not None and name is None:
        raise click.UsageError("--repair needs --data.")
    load_keras_quietly()
    from prunekit.anatomy.model_files import load_model
    from prunekit.anatomy.reports import layer_error_section
    from prunekit.delivery.terminal_report import inspect_table, print_section
    from prunekit.techniques.pruning.one_shot import prune as prune_model

    found = load_model(model, compile=False)
    if name is None:
        done = prune_model(found, sparsity, **options)
    else:
        with _progress() as progress:
            done = prune_model(found, sparsity, _examples(name, examples), repair=repair, progress=progress, **options)
    target = Path(output)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Keras chooses the format by the ending of the name.
    partial = target.with_name(f".unfinished-{target.name}")
    try:
        found.save(partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
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


def _examples(name: str, count: int) -> Any:
    """Returns training examples, drawn at random with seed 0."""
    import numpy as np

    from prunekit.recipe.data import load_data
    from prunekit.recipe.data_source import DataSource

    if not (name.endswith(".npz") or Path(name).is_dir()):
        raise click.UsageError(f"--data takes an .npz file or a folder of tf.data.Dataset.save. Received: {name!r}.")
    path = os.path.abspath(name)
    source = DataSource(npz=path) if name.endswith(".npz") else DataSource(tfds_saved=path)
    train = load_data(source, seed=0).train
    drawn = np.random.default_rng(0).choice(train.examples, min(count, train.examples), replace=False)
    return train.subset(np.sort(drawn)).calibration_data()


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function that shows which weight was pruned; it shows nothing where standard error is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    shown = Console(stderr=True)
    columns = (TextColumn("Pruned"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)


def _check_files(model: str, output: str, force: bool) -> None:
    if not Path(model).is_file():
        raise click.UsageError(f"{model}: no such file.")
    if not output.endswith(".keras"):
        raise click.UsageError(f"-o takes the name of a .keras file. Received: {output!r}.")
    if Path(output).exists() and not force:
        raise click.UsageError(f"{output} exists already. Pass --force to replace it.")


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
