"""What networks of different kinds keep after one call of `pk.prune`: the defaults beside the other rows."""

import argparse
import fnmatch
import functools
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import prunekit as pk
from studies.kinds import KINDS, score, trained
from studies.results import Results
from studies.shorthands import made

SPARSITIES = (0.5, 0.8, 0.9, 0.95)
EXAMPLES = 512
# The default first: what "auto" takes.
WITHOUT_DATA = [("magnitude", allocation) for allocation in ("lamp", "erk", "global", "global, l2", "uniform")]
WITH_DATA = [
    *(("output_error", allocation) for allocation in ("layer_error", "erk", "lamp")),
    *(("sparsegpt", allocation) for allocation in ("layer_error", "lamp")),
    ("wanda, whole weight", "layer_error"),
    ("magnitude", "layer_error"),
]
# The calls before criterion and allocation were chosen.
FORMER = {False: ("magnitude", "uniform"), True: ("magnitude", "uniform")}
WITH_OPTIONS = {
    "wanda, whole weight": {"type": "wanda", "per_output": False},
    "global, l2": {"type": "global", "normalization": "l2"},
}
PAGE = Path("docs/measured/defaults.md")
HEAD = f"""# Measured: defaults

What {len(KINDS)} trained networks of different kinds keep after one call of `pk.prune`, on data that were not trained
on: accuracy, or what the table names. With data: {EXAMPLES} training inputs, no labels. Seed 0, one run.
`scripts/study defaults` makes this page, and measures what it shows as "–".

`pk.prune(model, s)` takes `magnitude` and `lamp`, `pk.prune(model, s, data)` takes `output_error` and `layer_error`.
The regret of a row is how many points it loses to the best row of its table, on the same network at the same sparsity.
"""


def measured(name: str, criterion: str, allocation: str, sparsity: float, *, data: bool) -> float:
    """Returns what a newly pruned network keeps."""
    from prunekit.sparsity.shorthands import ALLOCATIONS, CRITERIA

    model, weights = _network(name)
    model.set_weights(weights)
    (inputs, _), _ = KINDS[name].data()
    options: Any = {
        "criterion": made(CRITERIA, WITH_OPTIONS.get(criterion, criterion)),
        "allocation": made(ALLOCATIONS, WITH_OPTIONS.get(allocation, allocation)),
    }
    with warnings.catch_warnings():
        # At 95 % some rows leave a single weight in a layer.
        warnings.simplefilter("ignore", UserWarning)
        pk.prune(model, sparsity, inputs[:EXAMPLES] if data else None, **options)
    return score(name, model)


@functools.lru_cache(maxsize=1)
def _network(name: str) -> tuple[Any, list[Any]]:
    """Returns the network and its trained weights; kept, so that it is traced once."""
    model = trained(name)
    return model, model.get_weights()


def rows_of(data: bool) -> list[tuple[str, str]]:
    """The combinations of a table: the default, the others, the former default."""
    rows = WITH_DATA if data else WITHOUT_DATA
    return [*rows, *([] if FORMER[data] in rows else [FORMER[data]])]


def key(name: str, data: bool, criterion: str, allocation: str, sparsity: float) -> str:
    """The key of a measurement."""
    return f"{name} / {'data' if data else 'no data'} / {criterion} / {allocation} / {sparsity}"


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    parts = [HEAD]
    for data in (False, True):
        parts += [f"\n## {'With' if data else 'Without'} data\n", *_regrets(results, data)]
    for data in (False, True):
        for sparsity in SPARSITIES:
            parts += [f"\n### {sparsity:.0%}, {'with' if data else 'without'} data\n", *_kept(results, data, sparsity)]
    return "\n".join(parts) + "\n"


def _regrets(results: Results, data: bool) -> list[str]:
    """Median and largest regret of each row over networks and sparsities, in points."""
    rows = rows_of(data)
    lines = [
        "| criterion | allocation | median | largest | "
        + " | ".join(f"median at {sparsity:.0%}" for sparsity in SPARSITIES)
        + " | cases |",
        "|---|---|---:|---:|" + "---:|" * (len(SPARSITIES) + 1),
    ]
    for row in rows:
        each = {sparsity: _regrets_at(results, data, rows, row, sparsity) for sparsity in SPARSITIES}
        every = [value for values in each.values() for value in values]
        if not every:
            continue
        at = " | ".join(f"{statistics.median(values):.2f}" if values else "–" for values in each.values())
        names = " | ".join(f"**{name}**" if row == rows[0] else name for name in row)
        figures = f"{statistics.median(every):.2f} | {max(every):.2f} | {at} | {len(every)}"
        lines.append(f"| {names} | {figures} |")
    return lines


def _regrets_at(
    results: Results, data: bool, rows: Sequence[tuple[str, str]], row: tuple[str, str], sparsity: float
) -> list[float]:
    found = []
    for name in KINDS:
        values = {one: results.values.get(key(name, data, *one, sparsity)) for one in rows}
        known = [value for value in values.values() if value is not None]
        # Regrets compare with all rows, so that a network counts when it is whole.
        if len(known) == len(rows):
            found.append(100 * (max(known) - values[row]))
    return found


def _kept(results: Results, data: bool, sparsity: float) -> list[str]:
    rows = rows_of(data)
    lines = [
        "| network | dense | " + " | ".join(", ".join(row) for row in rows) + " |",
        "|---|---:|" + "---:|" * len(rows),
    ]
    for name, kind in KINDS.items():
        values = [results.values.get(key(name, data, *row, sparsity)) for row in rows]
        best = max((value for value in values if value is not None), default=None)
        cells = ["–" if one is None else f"**{one:.4f}**" if one == best else f"{one:.4f}" for one in values]
        dense = results.values.get(f"{name} / dense")
        lines.append(f"| {kind.title} | {'–' if dense is None else f'{dense:.4f}'} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measures what is missing, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help='Pattern of "network / data / criterion / allocation / sparsity".')
    only = parser.parse_args().only
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    results = Results(PAGE.with_suffix(".json"))
    for name in KINDS:
        rows = [(data, *row, s) for data in (False, True) for row in rows_of(data) for s in SPARSITIES]
        wanted = [row for row in rows if fnmatch.fnmatch(key(name, *row), only)]
        if wanted:
            results.get(f"{name} / dense", lambda name=name: score(name, _network(name)[0]))
        for data, criterion, allocation, sparsity in wanted:
            found = results.get(
                key(name, data, criterion, allocation, sparsity),
                lambda row=(name, criterion, allocation, sparsity), data=data: measured(*row, data=data),
            )
            print(f"{found:.4f}  {key(name, data, criterion, allocation, sparsity)}", flush=True)
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
