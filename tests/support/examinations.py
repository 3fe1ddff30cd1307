"""What the doctor found: by the names of the checks, and as people see it."""

from rich.console import Console

from prunekit import doctor


def checks_of(found):
    return {check.name: check for check in found.checks}


def shown(found, *, width=80, terminal=False):
    console = Console(width=width, force_terminal=terminal, color_system=None, highlight=False)
    with console.capture() as capture:
        doctor.show_examination(found, console)
    return capture.get()
