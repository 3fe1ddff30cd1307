"""What networks of different kinds keep after one call of `pk.prune` or `pk.shrink`: the defaults beside other rows."""

import argparse
import fnmatch
import functools
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

import prunekit as pk
from prunekit.sparsity.shorthands import ALLOCATIONS, CRITERIA
from studies.kinds import KINDS, score, trained
from studies.results import Results
from studies.shorthands import made

EXAMPLES = 512
EPOCHS, BATCH = 8, 64
Row = tuple[str, str]
# Ends the allocation of a call without data that is repaired on synthetic inputs.
SYNTHETIC = ", synthetic inputs"
WITH_OPTIONS = {
    "wanda, whole weight": {"type": "wanda", "per_output": False},
    "global, l2": {"type": "global", "normalization": "l2"},
}


@dataclass(frozen=True)
class Table:
    """Calls that differ in criterion and allocation.

    Attributes:
        title: Heading.
        call: The call with the defaults.
        rows: (criterion, allocation), which may end with `SYNTHETIC`: the default first, what it was before last.
        shares: Sparsities, or shares of the channels that are left.
        data: Whether the calls have data.
        shrinks: Whether they remove channels.
        trains: Whether they prune while the network is trained on.
    """

    title: str
    call: str
    rows: Sequence[Row]
    shares: Sequence[float]
    data: bool
    shrinks: bool = False
    trains: bool = False


DEFAULT, FORMER = ("auto", "auto"), ("magnitude", "uniform")
SPARSITIES, CHANNELS = (0.5, 0.8, 0.9, 0.95), (0.75, 0.5)
TABLES = {
    "no data": Table(
        "Zeros, without data",
        "pk.prune(model, s)",
        [
            DEFAULT,
            *(("output_error", name + SYNTHETIC) for name in ("layer_error", "lamp")),
            ("magnitude", "lamp" + SYNTHETIC),
            *(("magnitude", name) for name in ("lamp", "erk", "global", "global, l2")),
            FORMER,
        ],
        SPARSITIES,
        data=False,
    ),
    "data": Table(
        "Zeros, with data",
        "pk.prune(model, s, data)",
        [
            DEFAULT,
            *(("output_error", name) for name in ("layer_error", "lamp", "erk")),
            *(("sparsegpt", name) for name in ("layer_error", "lamp")),
            ("wanda, whole weight", "layer_error"),
            ("magnitude", "layer_error"),
            FORMER,
        ],
        SPARSITIES,
        data=True,
    ),
    "training": Table(
        "Zeros, in a training",
        "model.fit(..., callbacks=[pk.PruningCallback(schedule)])",
        [*(("magnitude", name) for name in ("lamp", "erk", "global")), FORMER],
        SPARSITIES[1:],
        data=False,
        trains=True,
    ),
    "channels": Table(
        "Channels, without data",
        "pk.shrink(model, channels=c)",
        [
            DEFAULT,
            *((name, way + SYNTHETIC) for name in ("l2", "output_error") for way in ("uniform", "global")),
            ("l2", "uniform"),
            *(("geometric_median", name) for name in ("uniform", "global")),
            FORMER,
        ],
        CHANNELS,
        data=False,
        shrinks=True,
    ),
    "channels, data": Table(
        "Channels, with data",
        "pk.shrink(model, channels=c, data=data)",
        [
            DEFAULT,
            *((name, way) for name in ("l2", "output_error") for way in ("uniform", "global")),
            *((name, "uniform") for name in ("mean_activation", "geometric_median")),
            FORMER,
        ],
        CHANNELS,
        data=True,
        shrinks=True,
    ),
}
# What the best row keeps of the dense network's score in the column "usable".
_USABLE = 0.8
PAGE = Path("docs/measured/defaults.md")
HEAD = f"""# Measured: defaults

What {len(KINDS)} trained networks of different kinds keep after one call, on data that were not trained on: accuracy,
or what the table names. With data: {EXAMPLES} training inputs, no labels. "Synthetic inputs": no data, and kept
weights are fitted to what the layers compute on random signals. In a training: {EPOCHS} epochs more, with mask updates
in the first two thirds; networks for Fashion-MNIST: [pruning during training](during-training.md). Seed 0, one run.
`scripts/study defaults` makes this page, and measures what it shows as "–".

Each table has [the default](../criteria.md#what-auto-takes) in the first row or column, and what was the default before
in the last. The regret of a row is how many points it loses to the best row of its table, on the same
network at the same size. Where the best row itself has lost most of what the dense network knows, regrets are large and
tell little: "usable" are the cases where it keeps {_USABLE:.0%} of the dense network's score.

What is tried, the error that ranks it and its factor on synthetic inputs were chosen on these networks: on others the
default may lose more. Where it is not the best row here, synthetic inputs rank two ways otherwise than data do
(attention at 80% and 90%, the CNN for Fashion-MNIST at 95%), or the best way is not tried (`erk` for the words at 90%,
with data).
"""


def measured(name: str, table: Table, row: Row, share: float) -> float | None:
    """Returns what a newly pruned or shrunk network keeps; None if the method does not serve the network."""
    model, weights = _network(name)
    model.set_weights(weights)
    data = KINDS[name].data()[0][0][:EXAMPLES] if table.data else None
    criterion, allocation = (WITH_OPTIONS.get(option, option) for option in (row[0], row[1].removesuffix(SYNTHETIC)))
    options: Any = {}
    if row != DEFAULT:
        named = allocation if table.shrinks else made(ALLOCATIONS, allocation)
        options = {"criterion": made(CRITERIA, criterion), "allocation": named}
    if row[1].endswith(SYNTHETIC):
        options["repair"] = "weights"
    with warnings.catch_warnings():
        # At 95 % some rows leave a single weight in a layer.
        warnings.simplefilter("ignore", UserWarning)
        try:
            if table.trains:
                _train(name, model, share, **options)
            elif table.shrinks:
                model, _ = pk.shrink(model, channels=share, data=data, **options)
            else:
                pk.prune(model, share, data, **options)
        except ValueError as error:
            print(f"{name}, {row}: {error}", flush=True)
            return None
    return score(name, model)


def _train(name: str, model: Any, sparsity: float, **options: Any) -> None:
    """Prunes the network in `EPOCHS` epochs, with updates in the first two thirds of them."""
    kind = KINDS[name]
    data = kind.data()[0]
    steps = EPOCHS * -(-len(data[0]) // BATCH)
    schedule = pk.schedules.PolynomialDecay(0.0, sparsity, 0, 2 * steps // 3, frequency=max(1, steps // 60))
    keras.utils.set_random_seed(0)
    model.compile(keras.optimizers.Adam(0.001), kind.loss)
    callback = pk.PruningCallback(schedule, **options)
    model.fit(*data, epochs=EPOCHS, batch_size=BATCH, verbose=0, callbacks=[callback])


@functools.lru_cache(maxsize=1)
def _network(name: str) -> tuple[Any, list[Any]]:
    """Returns the network and its trained weights; kept, so that it is traced once."""
    model = trained(name)
    return model, model.get_weights()


def key(name: str, table: str, row: Row, share: float) -> str:
    """The key of a measurement."""
    return f"{name} / {table} / {row[0]} / {row[1]} / {share}"


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    parts = [HEAD, *_first_calls(results)]
    for name, table in TABLES.items():
        parts += [f"\n## {table.title}\n", f"`{table.call}`. Regrets in points:\n", *_regrets(results, name)]
        for share in table.shares:
            of = f"{share:.0%} of the channels left" if table.shrinks else f"{share:.0%} zeros"
            parts += [f"\n{of}:\n", *_kept(results, name, share)]
    return "\n".join(parts) + "\n"


#: (network, table, size): calls that a newcomer writes.
FIRST_CALLS = [
    *(("fashion-cnn", table, share) for table in ("no data", "data") for share in (0.8, 0.9)),
    *(("mnist", table, share) for table in ("no data", "data") for share in (0.9, 0.95)),
    ("digits-cnn", "no data", 0.8),
    ("digits-cnn", "no data", 0.95),
    ("unet", "no data", 0.8),
    ("regression", "no data", 0.8),
    ("digits-cnn", "training", 0.95),
    ("depthwise", "data", 0.9),
    ("unet", "data", 0.8),
    ("unet", "training", 0.9),
    ("regression", "data", 0.8),
    ("mnist", "channels", 0.5),
    ("unet", "channels", 0.75),
    ("depthwise", "channels", 0.5),
    ("fashion-cnn", "channels, data", 0.5),
]


def _first_calls(results: Results) -> list[str]:
    """Returns the table of the defaults before and now."""
    lines = [
        "\n## First calls\n",
        "| network | call | dense | former default | default |",
        "|---|---|---:|---:|---:|",
    ]
    for name, table, share in FIRST_CALLS:
        rows = TABLES[table].rows
        values = [results.values.get(key(name, table, row, share)) for row in (rows[-1], rows[0])]
        cells = ["–" if value is None else f"{value:.4f}" for value in (results.values.get(f"{name} / dense"), *values)]
        call = TABLES[table].call.replace("channels=c", f"channels={share:g}").replace("model, s", f"model, {share:g}")
        call = call.replace("pk.PruningCallback(schedule)", f"pk.PruningCallback({share:g})")
        lines.append(f"| {KINDS[name].title} | `{call}` | {' | '.join(cells)} |")
    return lines


def _regrets(results: Results, name: str) -> list[str]:
    """Median and largest regret of each row over networks and sizes."""
    table = TABLES[name]
    sizes = " | ".join(f"median at {share:.0%}" for share in table.shares)
    lines = [
        f"| criterion | allocation | median | mean | largest | largest, usable | {sizes} | cases |",
        "|---|---|---:|---:|---:|---:|" + "---:|" * (len(table.shares) + 1),
    ]
    for row in table.rows:
        each = [_regrets_at(results, name, row, share) for share in table.shares]
        every = [value for values in each for value in values]
        usable = [value for share in table.shares for value in _regrets_at(results, name, row, share, least=_USABLE)]
        if every:
            at = " | ".join(f"{statistics.median(values):.2f}" if values else "–" for values in each)
            names = " | ".join(f"**{option}**" if row == table.rows[0] else option for option in row)
            figures = [statistics.median(every), statistics.mean(every), max(every), max(usable, default=0.0)]
            shown = " | ".join(f"{value:.2f}" for value in figures)
            lines.append(f"| {names} | {shown} | {at} | {len(every)} |")
    return lines


def _regrets_at(results: Results, table: str, row: Row, share: float, least: float = 0.0) -> list[float]:
    """Returns the regrets where the best row keeps at least the share `least` of what the dense network has."""
    found = []
    for name in KINDS:
        values = {one: results.values.get(key(name, table, one, share)) for one in TABLES[table].rows}
        # Regrets compare with all rows: a network counts when it is whole.
        if None not in values.values() and max(values.values()) >= least * results.values[f"{name} / dense"]:
            found.append(100 * (max(values.values()) - values[row]))
    return found


def _kept(results: Results, table: str, share: float) -> list[str]:
    rows = TABLES[table].rows
    lines = [
        "| network | dense | " + " | ".join(", ".join(row) for row in rows) + " |",
        "|---|---:|" + "---:|" * len(rows),
    ]
    for name, kind in KINDS.items():
        values = [results.values.get(key(name, table, row, share)) for row in rows]
        best = max((value for value in values if value is not None), default=None)
        cells = ["–" if one is None else f"**{one:.4f}**" if one == best else f"{one:.4f}" for one in values]
        dense = results.values.get(f"{name} / dense")
        lines.append(f"| {kind.title} | {'–' if dense is None else f'{dense:.4f}'} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measures what is missing, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help='Pattern of "network / table / criterion / allocation / size".')
    only = parser.parse_args().only
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    results = Results(PAGE.with_suffix(".json"))
    for name in KINDS:
        # The networks for MNIST and Fashion-MNIST are trained in `scripts/study during-training`.
        tables = {name_of: of for name_of, of in TABLES.items() if not of.trains or KINDS[name].epochs}
        cases = [(table, row, share) for table, of in tables.items() for row in of.rows for share in of.shares]
        wanted = [case for case in cases if fnmatch.fnmatch(key(name, *case), only)]
        if wanted:
            results.get(f"{name} / dense", lambda name=name: score(name, _network(name)[0]))
        for table, row, share in wanted:
            found = results.get(
                key(name, table, row, share),
                lambda case=(name, TABLES[table], row, share): measured(*case),
            )
            print(f"{found}  {key(name, table, row, share)}", flush=True)
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
