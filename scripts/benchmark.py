"""Runs the workers of scripts/bench in turns and writes what they measured. Needs no TensorFlow in this process.

One process per library trains plain and pruned models side by side (see benchmark_worker.py); rounds go to the two
processes alternately. Peak memory is read in a process of its own per configuration.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmark_backends import section as backends_section
from benchmark_backends import tasks as backend_tasks
from benchmark_report import START_UP, document, replaced
from benchmark_scale import picture
from benchmark_scale import section as scale_section
from benchmark_scale import tasks as scale_tasks

WORKER = Path(__file__).with_name("benchmark_worker.py")
TOOLS = Path(__file__).with_name("benchmark_tools.py")
PREFIX = Path(__file__).with_name("benchmark_prefix.py")
PARTS = Path(__file__).with_name("benchmark_parts.py")
SCALE = Path(__file__).with_name("benchmark_scale.py")
BACKENDS = Path(__file__).with_name("benchmark_backends.py")
STEPS_PER_TURN = 5
# Sections that can be measured by themselves: their program, and its tasks.
APART = {"scale": (SCALE, scale_tasks), "backends": (BACKENDS, backend_tasks)}

# (contestant, frequency or None, steps) by thoroughness, model and library. Updates of tensorflow-model-optimization
# take seconds, so that its pruned contestants get fewer steps: what is compared is one step and one update.
PLANS: dict[str, dict[str, dict[str, list[tuple[str, int | None, int]]]]] = {
    "full": {
        "perceptron": {
            "prunekit": [
                ("plain", None, 300),
                ("control", None, 300),
                ("100", 100, 300),
                ("10", 10, 150),
                ("1", 1, 30),
            ],
            "tfmot": [("plain", None, 200), ("100", 100, 200), ("10", 10, 50), ("1", 1, 10)],
        },
        "resnet20": {
            "prunekit": [
                ("plain", None, 200),
                ("control", None, 200),
                ("100", 100, 200),
                ("10", 10, 100),
                ("1", 1, 30),
            ],
            "tfmot": [("plain", None, 100), ("100", 100, 100), ("10", 10, 50), ("1", 1, 20)],
        },
    },
    "quick": {
        "perceptron": {
            "prunekit": [("plain", None, 100), ("control", None, 100), ("100", 100, 100), ("10", 10, 50), ("1", 1, 10)],
            "tfmot": [("plain", None, 50), ("10", 10, 20), ("1", 1, 10)],
        },
        "resnet20": {
            "prunekit": [("plain", None, 25), ("control", None, 25), ("100", 100, 25), ("10", 10, 25), ("1", 1, 10)],
            "tfmot": [("plain", None, 20), ("10", 10, 20), ("1", 1, 10)],
        },
    },
}


class Worker:
    """A process of benchmark_worker.py; a context manager, so that none outlives this script."""

    def __init__(self, program: Path, **task: Any):
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(program), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def hear(self) -> dict[str, Any]:
        """The next line of JSON; others are what libraries print."""
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        self._errors.seek(0)
        raise SystemExit(f"error: a worker ended early. Its last words:\n{self._errors.read()[-3000:]}")

    def tell(self) -> None:
        """Hands it the next round."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()


def trainings(model: str, plan: dict[str, list[Any]], smoke: bool) -> dict[str, Any]:
    """library -> contestant -> {"seconds": of the whole fit, "steps": rows as in benchmark_worker.Contestant}."""
    tasks = {
        library: {
            "kind": "turns", "library": library, "model": model, "smoke": smoke, "contestants": contestants,
            "per_turn": 2 if smoke else STEPS_PER_TURN,
        }
        for library, contestants in plan.items()
    }  # fmt: skip
    with Worker(WORKER, **tasks["prunekit"]) as ours, Worker(WORKER, **tasks["tfmot"]) as theirs:
        workers = {"prunekit": ours, "tfmot": theirs}
        for worker in workers.values():
            worker.hear()
        running = list(workers.values())
        while running:
            for worker in list(running):
                worker.tell()
                if worker.hear()["left"] == 0:
                    running.remove(worker)
        return {
            library: {row.pop("name"): row for row in worker.hear()["results"]} for library, worker in workers.items()
        }


def memories(model: str, smoke: bool) -> dict[str, Any]:
    """configuration -> {"before": training began, "peak": highest}, resident memory in MiB; two at a time."""
    configurations = [(library, name) for library in ("prunekit", "tfmot") for name in ("plain", "pruned")]

    def one(configuration) -> dict[str, Any]:
        library, name = configuration
        contestant = (name, None if name == "plain" else 2, 8)
        with Worker(
            WORKER, kind="memory", library=library, model=model, smoke=smoke, per_turn=1, contestants=[contestant]
        ) as worker:
            return worker.hear()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, configurations))
    return {f"{library} {name}": row for (library, name), row in zip(configurations, found, strict=True)}


def tool(name: str, **task: Any) -> dict[str, Any]:
    """What benchmark_tools.py answers."""
    return asked(TOOLS, tool=name, **task)


def asked(program: Path, **task: Any) -> dict[str, Any]:
    """What a program answers to its one task."""
    with Worker(program, **task) as worker:
        return worker.hear()


def startups(repeats: int) -> dict[str, list[float]]:
    """command -> seconds of each run of it, from its start to its end; in turns, after one that nobody counts."""
    program = Path(sys.executable).with_name("prunekit")
    commands = [[], ["--help"], ["--version"], ["recipes"], ["check", "digits"]]
    found: dict[str, list[float]] = {}
    for turn in range(repeats + 1):
        for words in commands:
            began = time.perf_counter()
            # Without words: what an interpreter that imports nothing takes.
            command = [program, *words] if words else [sys.executable, "-c", "pass"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if turn:
                name = f"prunekit {' '.join(words)}" if words else "python -c pass"
                found.setdefault(name, []).append(time.perf_counter() - began)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one JSON-ready object."""
    plans = PLANS["quick" if options.quick else "full"]
    raw: dict[str, Any] = {"load_before": os.getloadavg()[0], "models": {}}
    for model in options.models:
        plan = plans[model]
        if options.smoke:
            plan = {library: [(n, f, min(steps, 12)) for n, f, steps in rows] for library, rows in plan.items()}
        for title, found in stages(model, plan, options):
            raw["models"].setdefault(model, {})[title] = found
    turns = 2 if options.smoke else 9
    say("selection of the k-th largest")
    raw["selection"] = tool("selection", size=20_000 if options.smoke else 1 << 22, repeats=turns)
    say("loops")
    raw["loops"] = tool("loops", model="perceptron", smoke=options.smoke, repeats=turns)
    say("second-order steps")
    raw["least_squares"] = tool("least_squares", smoke=options.smoke, repeats=turns)
    say("gradients of single examples")
    raw["gradients"] = tool("gradients", smoke=options.smoke, repeats=turns)
    say("what updates change")
    raw["changes"] = tool("changes", smoke=options.smoke, repeats=2 * turns)
    say("cached prefixes")
    raw["prefix"] = asked(PREFIX, smoke=options.smoke, repeats=turns)
    say("backward in parts")
    raw["parts"] = {name: asked(PARTS, network=name, smoke=options.smoke, repeats=turns) for name in ("wide", "deep")}
    if options.smoke or not options.quick:
        raw |= {name: rows_of(name, options.smoke) for name in APART}
    say("start-up")
    raw["startup"] = startups(turns)
    raw["load_after"] = os.getloadavg()[0]
    return raw


def rows_of(name: str, smoke: bool) -> list[dict[str, Any]]:
    """The tasks of a section that can be measured by itself, with what was found."""
    say(name)
    program, tasks = APART[name]
    return [{"task": task, "found": asked(program, **task)} for task in tasks(smoke)]


def stages(model: str, plan: dict[str, list[Any]], options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """(title, figures) of each thing measured on one model."""
    say(f"{model}: training in turns")
    yield "trainings", trainings(model, plan, options.smoke)
    # Four processes that trace ResNet-20 take a minute: not in a quick run.
    if not options.quick or model == "perceptron":
        say(f"{model}: peak memory")
        yield "memories", memories(model, options.smoke)


def part(raw: dict[str, Any], page: str) -> str:
    """The page with the sections that were measured."""
    sections = [scale_section(raw["scale"], raw["picture"])] if "scale" in raw else []
    sections += [backends_section(raw["backends"])] if "backends" in raw else []
    return replaced(page, sections, raw["command"])


def say(what: str) -> None:
    """Progress, with the time since the start."""
    print(f"{time.monotonic() - BEGAN:5.0f} s  {what}", file=sys.stderr, flush=True)


BEGAN = time.monotonic()


def main() -> None:
    """Parses arguments, measures, writes the page."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps: under two minutes, wider spread")
    parser.add_argument("--smoke", action="store_true", help="tiny models: shows that it runs, the figures say nothing")
    parser.add_argument("--models", nargs="+", choices=list(PLANS["full"]), default=list(PLANS["full"]))
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks.md"), help="page to write")
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    parser.add_argument("--only", nargs="+", choices=list(APART), help="measure these sections of a page that is there")
    options = parser.parse_args()
    if options.only:
        if not options.output.is_file():
            parser.error(f"--only replaces sections of a page. Received: no {options.output}; run without it first.")
        if START_UP not in options.output.read_text():
            parser.error(
                f"--only replaces sections of a page of scripts/bench. Received: {options.output}, which is none."
            )
        raw: dict[str, Any] = {name: rows_of(name, options.smoke) for name in options.only}
    else:
        raw = measure(options)
    raw["minutes"] = (time.monotonic() - BEGAN) / 60
    flags = [f"--{name}" for name in ("quick", "smoke") if getattr(options, name)]
    chosen = ["--models", *options.models] if options.models != list(PLANS["full"]) else []
    chosen += ["--only", *options.only] if options.only else []
    raw["command"] = " ".join(["scripts/bench", *flags, *chosen])
    if options.json:
        options.json.write_text(json.dumps(raw))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if "scale" in raw:
        raw["picture"] = f"images/{options.output.stem}-scale.png"
        (options.output.parent / "images").mkdir(exist_ok=True)
        picture(raw["scale"], options.output.parent / raw["picture"])
    options.output.write_text(part(raw, options.output.read_text()) if options.only else document(raw))
    say(f"wrote {options.output}")


if __name__ == "__main__":
    main()
