"""Measures prunekit beside plain Keras and tensorflow-model-optimization, and writes a page of figures.

What scripts/bench runs. Needs no TensorFlow in this process: sections measure in worker processes.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.page import SECTIONS, document, updated
from benchmarks.sections import command_line, scale, training
from benchmarks.workers import Workers

# Sections that take minutes: not in a quick run, unless it is a smoke test.
SLOW = ("quantization", "integer_files", "scale", "backends", "start")


def measure(options: argparse.Namespace, workers: Workers) -> dict[str, Any]:
    """Everything, as one JSON-ready object."""
    raw: dict[str, Any] = {"load_before": os.getloadavg()[0], "models": {}}
    for model in options.models:
        say(model)
        raw["models"][model] = dict(training.collect(workers, model, options.quick, options.smoke))
    names = [name for name in SECTIONS if options.smoke or not options.quick or name not in SLOW]
    raw |= measure_sections(names, workers, options.smoke)
    raw["load_after"] = os.getloadavg()[0]
    return raw


def measure_sections(names: list[str], workers: Workers, smoke: bool) -> dict[str, Any]:
    """The figures of each of these sections."""
    found = {}
    for name in names:
        say(f"section {name}")
        found[name] = SECTIONS[name].collect(workers, smoke)
    return found


def say(what: str) -> None:
    """Progress, with the time since the start."""
    print(f"{time.monotonic() - BEGAN:5.0f} s  {what}", file=sys.stderr, flush=True)


BEGAN = time.monotonic()


def parsed() -> argparse.Namespace:
    """The options of the command line; ends the program where they are refused."""
    models = list(training.TITLES)
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps: under two minutes, wider spread")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny models: a test of the program; the figures mean nothing"
    )
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks.md"), help="page to write")
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SECTIONS),
        help="measure only these sections, and replace them in the existing page",
    )
    options = parser.parse_args()
    if options.only:
        if not options.output.is_file():
            parser.error(f"--only replaces sections of a page. Received: no {options.output}; run without it first.")
        if command_line.HEADING not in options.output.read_text():
            parser.error(
                f"--only replaces sections of a page of scripts/bench. Received: {options.output}, which is none."
            )
    return options


def main() -> None:
    """Parses arguments, measures, writes the page."""
    options = parsed()
    with Workers(shared=options.smoke) as workers:
        raw = measure_sections(options.only, workers, options.smoke) if options.only else measure(options, workers)
    raw["minutes"] = (time.monotonic() - BEGAN) / 60
    flags = [f"--{name}" for name in ("quick", "smoke") if getattr(options, name)]
    chosen = ["--models", *options.models] if options.models != list(training.TITLES) else []
    chosen += ["--only", *options.only] if options.only else []
    raw["command"] = " ".join(["scripts/bench", *flags, *chosen])
    if options.json:
        options.json.write_text(json.dumps(raw))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if "scale" in raw:
        raw["picture"] = f"images/{options.output.stem}-scale.png"
        (options.output.parent / "images").mkdir(exist_ok=True)
        scale.picture(raw["scale"], options.output.parent / raw["picture"])
    options.output.write_text(updated(options.output.read_text(), raw) if options.only else document(raw))
    say(f"wrote {options.output}")


if __name__ == "__main__":
    main()
