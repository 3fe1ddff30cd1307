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
    enforcement,
    integer_files,
    least_squares,
    loops,
    per_example,
    quantization,
    reconstruction,
    removal,
    scale,
    scores,
    selection,
    sensitivity,
    start,
    training,
    weight_changes,
)
from benchmarks.tables import table

# Name of the raw figures -> section, in the order of the page; the sections of the models come before.
SECTIONS: dict[str, ModuleType] = {
    "selection": selection,
    "loops": loops,
    "enforcement": enforcement,
    "least_squares": least_squares,
    "gradients": per_example,
    "reconstruction": reconstruction,
    "scores": scores,
    "sensitivity": sensitivity,
    "removal": removal,
    "quantization": quantization,
    "integer_files": integer_files,
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
        "Do not edit this page: run the command again.",
        f"Machine: {machine()}. Load average {raw['load_before']:.1f} before and {raw['load_after']:.1f} after"
        + (
            ": **other programs were using the machine**, so times are longer than on an idle machine, and ratios of "
            "times are uncertain by about the difference between the two unpruned models. CPU seconds are less "
            "affected."
            if busy
            else "."
        ),
    ]
    if "--smoke" in raw["command"]:
        notes.append("**Tiny models and a few steps, to see that the program runs: the figures mean nothing.**")
    wanted = [row for name, model in raw["models"].items() for row in training.verdicts(name, model)]
    parts = [
        *notes,
        "Each figure is a median, followed by the quartiles in brackets. Ratios are relative to the unpruned model of "
        "the "
        "same library.",
        "## Wanted and measured",
        table(["", "wanted", "measured", "second unpruned model", "met"], wanted),
        *(training.section(name, model) for name, model in raw["models"].items()),
        *sections(raw),
        "## How it is measured",
        METHOD,
    ]
    return "\n\n".join(parts) + "\n"


def updated(page: str, raw: dict[str, Any]) -> str:
    """Returns the page with the measured sections in place of the former sections with the same headings.

    A new section is inserted before the start-up of the command line, which every page has.
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
- The times are measured in real `fit` calls with callbacks, on batches in memory. The time of a step runs from the end
  of the previous batch to the end of the last callback of its own batch. It includes the data, the compiled step, the
  callbacks and mask updates.
- All models of a library are trained in one process, in one thread per model, of which exactly one runs at a time. In
  each round, each model trains for five steps; the first model of a round changes from round to round. The processes of
  the two libraries alternate between rounds. A ratio compares steps of the same round, so a slowdown of the machine
  affects all models. The second unpruned model shows the ratio that the method measures for equal models.
- CPU seconds are the sum over all cores of the process. They show the added work, and hardly change if other programs
  use the machine.
- Pruned models follow `PolynomialDecay` from 0 to 0.9 over their whole training, with `PruningCallback` in prunekit and
  with `prune_low_magnitude` and `UpdatePruningStep` in tensorflow-model-optimization; other settings are the defaults.
- "Whole fit" runs from the call of `fit` to the end of the last callback, including the first trace and the creation of
  the masks; "mean step" excludes the first five steps.
- Peak memory is `ru_maxrss` after eight steps with four mask updates."""
