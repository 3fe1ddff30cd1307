"""The command line: prunekit init | compress | sweep | check | verify | search | report | compare | recipes |
inspect | sensitivity | prune | shrink | simplify | remove-blocks | quantize | cluster | export | pack |
unpack | evaluate | convert | doctor.

The commands are in `prunekit/commands/`.
Exit codes: 0 success; 1 an expectation was not met, a point of a sweep failed, a file was not exported, a run was not
reproduced or an essential feature is missing; 2 a user error (one line); 70 a defect of prunekit (with a traceback).
"""

import os
import sys
import traceback
from collections.abc import Sequence

import click

from prunekit.commands import (
    clustering,
    evaluation,
    exporting,
    models,
    packing,
    quantizing,
    removals,
    results,
    runs,
    scan,
    searching,
    start,
)
from prunekit.missing_packages import missing_backend
from prunekit.terminal import TRACEBACK, warnings_in_lines
from prunekit.version import __version__

DEFECT = 70
COMMANDS = (
    *(start.init, runs.compress, runs.sweep, runs.check, runs.verify),
    *(searching.search,),
    *(results.report, results.compare, results.recipes),
    *(models.inspect, scan.sensitivity, removals.prune, removals.shrink, removals.factorize),
    *(removals.simplify, removals.remove_blocks),
    *(quantizing.quantize, clustering.cluster, exporting.export, packing.pack, packing.unpack),
    *(evaluation.evaluate, models.convert, models.doctor),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and ends the process with its exit code."""
    try:
        code = run(arguments)
    except Exception:  # noqa: BLE001
        # Python's own exit code would be 1, which has another meaning here.
        traceback.print_exc()
        code = DEFECT
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Arguments after `prunekit`; None means the arguments of the process.

    Returns:
        The exit code.
    """
    try:
        with warnings_in_lines():
            code = cli.main(
                args=None if arguments is None else list(arguments), prog_name="prunekit", standalone_mode=False
            )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return 2
    except click.MissingParameter as error:
        command = error.ctx.command_path if error.ctx else "prunekit"
        return _mistake(f"{error.format_message()} See {command} --help.")
    except click.ClickException as error:
        return _mistake(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        click.echo("error: interrupted.", err=True)
        return 130
    except (BrokenPipeError, SystemExit) as error:
        # click and rich exit with 1, which has another meaning here, where a reader (`| head`) has closed the pipe.
        if isinstance(error, SystemExit) and error.code != 1:
            raise
        # Without this, Python reports the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        _traceback_wanted()
        return _mistake(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except (ValueError, TypeError, ImportError) as error:
        _traceback_wanted()
        return _mistake(_message_of(error))


def _message_of(error: Exception) -> str:
    message = str(error) or type(error).__name__
    # Errors that prunekit raises name the package and what needs it; only Python's own are replaced.
    if isinstance(error, ModuleNotFoundError) and message.startswith("No module named"):
        return missing_backend("This command", error) or message
    return message


def _mistake(message: str) -> int:
    from prunekit.recipe.text.yaml_reader import one_line

    click.echo(f"error: {one_line(message)}", err=True)
    return 2


def _traceback_wanted() -> None:
    """Re-raises the exception being handled where the environment asks for tracebacks."""
    if os.environ.get(TRACEBACK):
        raise


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"prunekit {__version__}")
        context.exit()


class _InOrder(click.Group):
    """Lists the commands in the order in which they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    epilog=f"Set {TRACEBACK}=1 to see the traceback of an error.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Makes Keras models smaller and faster: prunes, removes channels, quantizes, exports.

    Pruned weights stay exactly zero during training and in exported files. To begin: `prunekit inspect MODEL.keras`
    shows what a model is made of; `prunekit prune MODEL.keras --sparsity 0.8 -o NEW.keras` prunes it at once;
    `prunekit init MODEL.keras --data DATA` writes a recipe that prunes, trains, exports and reports."""


for _command in COMMANDS:
    cli.add_command(_command)


if __name__ == "__main__":
    main()
