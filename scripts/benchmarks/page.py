"""The page that scripts/bench writes: raw figures -> Markdown."""

import datetime
import os
from types import ModuleType
from typing import Any

from benchmarks.machine import machine
from benchmarks.sections import (
    backends,
    backward_parts,
    cached_prefix,
    command_line,
    least_squares,
    loops,
    per_example,
    scale,
    selection,
    start,
    training,
    weight_changes,
)
from benchmarks.tables import table

# The sections below those of the models, in the page's order, by the names of their raw figures.
SECTIONS: dict[str, ModuleType] = {
    "selection": selection,
    "loops": loops,
    "least_squares": least_squares,
    "gradients": per_example,
    "changes": weight_changes,
    "prefix": cached_prefix,
    "parts": backward_parts,
    "scale": scale,
    "backends": backends,
    "start": start,
    "startup": command_line,
}


def sections(raw: dict[str, Any]) -> list[str]:
    """The sections of SECTIONS that were measured."""
    # The section on scale shows a picture.
    pictures = {"scale": [raw["picture"]]} if "scale" in raw else {}
    return [module.section(raw[name], *pictures.get(name, [])) for name, module in SECTIONS.items() if name in raw]


def document(raw: dict[str, Any]) -> str:
    """The page."""
    cores = os.cpu_count() or 1
    busy = max(raw["load_before"], raw["load_after"]) > cores * 1.5
    notes = [
        "# Benchmarks",
        f"Written by `{raw['command']}` in {raw['minutes']:.1f} minutes on {datetime.date.today():%Y-%m-%d}. "
        "Do not edit: run it again.",
        f"Machine: {machine()}. Load average {raw['load_before']:.1f} before and {raw['load_after']:.1f} after"
        + (
            ": **other programs were using the machine**, so that times are longer than on a quiet one, and "
            "ratios of times uncertain by as much as the second unpruned model differs from the first. Seconds of CPU "
            "time suffer less."
            if busy
            else "."
        ),
    ]
    if "--smoke" in raw["command"]:
        notes.append("**Tiny models and a few steps, to see that the program runs: the figures say nothing.**")
    wanted = [row for name, model in raw["models"].items() for row in training.verdicts(name, model)]
    parts = [
        *notes,
        "Each figure is a median, with the quartiles behind it. Ratios are to the unpruned model of the same library.",
        "## Wanted and measured",
        table(["", "wanted", "measured", "unpruned twice", "met"], wanted),
        *(training.section(name, model) for name, model in raw["models"].items()),
        *sections(raw),
        "## How it is measured",
        METHOD,
    ]
    return "\n\n".join(parts) + "\n"


def updated(page: str, raw: dict[str, Any]) -> str:
    """The page with sections that were measured by themselves in the place of those of the same heading.

    A section that is new to the page stands before the start-up of the command line, which every page has.
    """
    for section in sections(raw):
        heading, _, text = section.partition("\n\n")
        source = (
            f"Measured by `{raw['command']}` on {datetime.date.today():%Y-%m-%d}, apart from the rest: {machine()}."
        )
        before, found, after = page.partition(f"{heading}\n")
        start_of_next = after.index("\n## ") + 1 if found else 0
        if not found:
            before, _, after = page.partition(command_line.HEADING)
            after = f"{command_line.HEADING}{after}"
        page = f"{before}{heading}\n\n{source}\n\n{text}\n\n{after[start_of_next:]}"
    return page


METHOD = """\
- Real `fit` calls with callbacks, on batches that are in memory. A step's time runs from the end of the batch before to
  the end of its own last callback, so that it includes the data, the compiled step, the callbacks and mask updates.
- All models of a library are trained side by side in one process, one thread each, of which exactly one runs at a time:
  each gets five steps, then the next one has its turn, and each round another one begins. The two libraries' processes
  take rounds alternately. A ratio compares steps of the same round, so that a machine that slows down slows all.
  The second unpruned model shows what the method makes of no difference at all.
- CPU seconds are those of all cores together, of the process. They show the work that is added, and hardly change where
  other programs take their share of the machine.
- Pruned models follow `PolynomialDecay` from 0 to 0.9 over their whole training, with `PruningCallback` and with
  `prune_low_magnitude` and `UpdatePruningStep`, each with its library's defaults otherwise.
- "Whole fit" runs from the call of `fit` to the end of the last callback, first trace and the making of masks included;
  "mean step" leaves the first five steps out.
- Peak memory is `ru_maxrss` after eight steps with four mask updates."""
