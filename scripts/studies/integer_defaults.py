"""What networks of different kinds keep after one call of `pk.quantize`: the defaults beside other options."""

import argparse
import fnmatch
import functools
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from studies.kinds import KINDS, score, trained
from studies.results import Results

BITS = (8, 4, 3, 2)
EXAMPLES, COUNTS = 512, (16, 64, 256, 512, 1024)
#: Options besides the bits; the defaults first.
ROWS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "equalize=True": {"equalize": True},
    "correct_biases=False": {"correct_biases": False},
    "correct_biases=True": {"correct_biases": True},
    'method="nearest"': {"method": "nearest"},
    'method="nearest", equalize=True': {"method": "nearest", "equalize": True},
    'method="gptq"': {"method": "gptq"},
    'method="awq"': {"method": "awq"},
    'weight_ranges="minmax"': {"weight_ranges": "minmax"},
    'weight_ranges="mse"': {"weight_ranges": "mse"},
    'activation_ranges="minmax"': {"activation_ranges": "minmax"},
    "damping=0.1": {"damping": 0.1},
}
#: Calls of weights alone: their options, and the number of training inputs that are read; the default first.
ALONE: dict[str, tuple[dict[str, Any], int]] = {
    "without data": ({"activation_bits": "float"}, 0),
    'without data, method="nearest"': ({"activation_bits": "float", "method": "nearest"}, 0),
    "with data": ({"activation_bits": "float"}, EXAMPLES),
}
#: Rows that equal the defaults, with 8 bits and with fewer.
SAME = {
    True: {'method="nearest"', 'method="nearest", equalize=True', 'weight_ranges="minmax"', "correct_biases=False"},
    False: {'method="gptq"', 'weight_ranges="mse"', "correct_biases=True"},
}
#: Arguments of `pk.QuantizationCallback` besides the bits, the defaults first; a share of the training for a step.
CALLBACKS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "begin_step: half": {"begin_step": 0.5},
    "freeze_step: half": {"freeze_step": 0.5},
    "freeze_step=-1": {"freeze_step": -1},
    "range_learning_rate=1e-4": {"range_learning_rate": 1e-4},
    "range_learning_rate=1e-2": {"range_learning_rate": 1e-2},
    'weight_ranges="minmax"': {"weight_ranges": "minmax"},
}
TRAINED, TRAINED_BITS, EPOCHS, BATCH = ("digits-cnn", "depthwise", "unet", "regression", "text"), (4, 2), 8, 64
PAGE = Path("docs/measured/integer-defaults.md")
HEAD = f"""# Measured: defaults of integers

What the trained networks of [defaults](defaults.md) keep after `pk.quantize(model, data, bits=bits)`, activations
with 8 bits, in the simulation of the integer file, on data that were not trained on: accuracy, or what the table names.
{EXAMPLES} training inputs, no labels; seed 0, one run. The regret of a row is how many points it loses to the best row
on the same network. Error: squared change of the outputs over that of the defaults, geometric mean over the networks.
`scripts/study integer-defaults` makes this page, and measures what it shows as "–".
"""


def measured(name: str, bits: int, options: dict[str, Any], examples: int) -> list[float] | None:
    """Returns what a network keeps as integers, and the squared change of its outputs; None if an option fails."""
    model, weights, outputs = _network(name)
    model.set_weights(weights)
    data = KINDS[name].data()[0][0][:examples] if examples else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            report = pk.quantize(model, data, bits=bits, **options)
        except ValueError as error:
            print(f"{name}, {options}: {error}", flush=True)
            return None
        with report.simulating():
            error = float(np.mean(np.square(_outputs(name, model) - outputs)))
            return [score(name, model), error]


def measured_training(name: str, bits: int, options: dict[str, Any]) -> list[float]:
    """Returns the same for a network that is trained on integers."""
    model, weights, outputs = _network(name)
    model.set_weights(weights)
    kind = KINDS[name]
    inputs, labels = kind.data()[0]
    steps = EPOCHS * -(-len(inputs) // BATCH)
    chosen = {option: round(value * steps) if value == 0.5 else value for option, value in options.items()}
    callback = pk.QuantizationCallback(inputs[:EXAMPLES], bits=bits, **chosen)
    keras.utils.set_random_seed(0)
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.001, steps)), kind.loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model.fit(inputs, labels, epochs=EPOCHS, batch_size=BATCH, verbose=0, callbacks=[callback])
    with callback.report.simulating():
        return [score(name, model), float(np.mean(np.square(_outputs(name, model) - outputs)))]


@functools.lru_cache(maxsize=1)
def _network(name: str) -> tuple[Any, list[Any], np.ndarray]:
    """Returns the network, its trained weights, and its outputs."""
    keras.utils.set_random_seed(0)
    model = trained(name)
    return model, model.get_weights(), _outputs(name, model)


def _outputs(name: str, model: Any) -> np.ndarray:
    return model.predict(KINDS[name].data()[1][0], batch_size=500, verbose=0)


def rows_at(bits: int) -> list[str]:
    """Returns the rows that differ from the defaults at these bits, and the defaults."""
    return [row for row in ROWS if row not in SAME[bits == 8]]


def key(name: str, bits: int, row: str) -> str:
    """The key of a measurement."""
    return f"{name} / {bits} / {row}"


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    parts = [HEAD]
    for bits in BITS:
        parts += _at(results, bits)
    parts += _in_training(results)
    parts += ["\n## Weights alone\n", '`pk.quantize(model, bits=bits, activation_bits="float")`.\n']
    parts += [f"| network | bits | {' | '.join(ALONE)} |", "|---|---:|" + "---:|" * len(ALONE)]
    for name, kind in KINDS.items():
        for bits in BITS[1:]:
            values = [results.values.get(key(name, bits, f"weights alone, {row}")) for row in ALONE]
            parts.append(f"| {kind.title} | {bits} | {' | '.join(map(_cell, values))} |")
    parts += ["\n## Number of examples\n", "The defaults, by the number of training inputs.\n"]
    parts += [f"| network | bits | {' | '.join(map(str, COUNTS))} |", "|---|---:|" + "---:|" * len(COUNTS)]
    for name, kind in KINDS.items():
        for bits in BITS[:3]:
            values = [results.values.get(key(name, bits, f"{count} examples")) for count in COUNTS]
            parts.append(f"| {kind.title} | {bits} | {' | '.join(_cell(value) for value in values)} |")
    return "\n".join(parts) + "\n"


def _in_training(results: Results) -> list[str]:
    cases = [(name, bits) for name in TRAINED for bits in TRAINED_BITS]
    values = [[results.values.get(key(*case, f"training, {row}")) for row in CALLBACKS] for case in cases]
    parts = ["\n## In a training\n", f"`pk.QuantizationCallback(data, bits=bits)`, {EPOCHS} epochs.\n"]
    parts += ["| options | median regret | largest | trainings |", "|---|---:|---:|---:|"]
    for row, regrets, _ in _regrets(list(CALLBACKS), values):
        parts.append(f"| {row} | {statistics.median(regrets):.2f} | {max(regrets):.2f} | {len(regrets)} |")
    parts += ["", f"| network | bits | {' | '.join(CALLBACKS)} |", "|---|---:|" + "---:|" * len(CALLBACKS)]
    for (name, bits), found in zip(cases, values, strict=True):
        parts.append(f"| {KINDS[name].title} | {bits} | {' | '.join(map(_cell, found))} |")
    return parts


def _regrets(rows: list[str], values: list[list[Any]]) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yields each row with its regrets in points, and its errors over those of the first row, of what is measured.

    Args:
        rows: The options, the defaults first.
        values: [score, error] or None of each row, for each network.
    """
    whole = [found for found in values if found[0] is not None]
    for index, row in enumerate(rows):
        pairs = [(found, found[index]) for found in whole if found[index] is not None]
        if pairs:
            regrets = [100 * (max(one[0] for one in found if one) - value[0]) for found, value in pairs]
            yield row, regrets, [value[1] / found[0][1] for found, value in pairs]


def _at(results: Results, bits: int) -> list[str]:
    rows = rows_at(bits)
    values = {name: [results.values.get(key(name, bits, row)) for row in rows] for name in KINDS}
    parts = [
        f"\n## {bits} bits\n",
        "| options | median regret | largest | error | networks |",
        "|---|---:|---:|---:|---:|",
    ]
    for row, regrets, ratios in _regrets(rows, list(values.values())):
        figures = f"{statistics.median(regrets):.2f} | {max(regrets):.2f} | {statistics.geometric_mean(ratios):.2f}"
        parts.append(f"| {row} | {figures} | {len(regrets)} |")
    parts += ["", f"| network | float32 | {' | '.join(rows)} |", "|---|---:|" + "---:|" * len(rows)]
    for name, kind in KINDS.items():
        dense = results.values.get(f"{name} / dense")
        cells = [_cell(None if dense is None else [dense]), *map(_cell, values[name])]
        parts.append(f"| {kind.title} | {' | '.join(cells)} |")
    return parts


def _cell(value: list[float] | None) -> str:
    return "–" if value is None else f"{value[0]:.4f}"


def main() -> None:
    """Measures what is missing, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help='Pattern of "network / bits / options".')
    only = parser.parse_args().only
    results = Results(PAGE.with_suffix(".json"))
    for name in KINDS:
        cases = [(bits, row, ROWS[row], EXAMPLES) for bits in BITS for row in rows_at(bits)]
        cases += [(bits, f"{count} examples", {}, count) for bits in BITS[:3] for count in COUNTS]
        cases += [(bits, f"weights alone, {row}", *ALONE[row]) for bits in BITS[1:] for row in ALONE]
        wanted = [case for case in cases if fnmatch.fnmatch(key(name, case[0], case[1]), only)]
        if wanted:
            results.get(f"{name} / dense", lambda name=name: score(name, _network(name)[0]))
        for bits, row, options, count in wanted:
            found = results.get(key(name, bits, row), lambda case=(name, bits, options, count): measured(*case))
            print(f"{found}  {key(name, bits, row)}", flush=True)
        for bits in TRAINED_BITS if name in TRAINED else ():
            for row, arguments in CALLBACKS.items():
                of_training = key(name, bits, f"training, {row}")
                if fnmatch.fnmatch(of_training, only):
                    found = results.get(of_training, lambda case=(name, bits, arguments): measured_training(*case))
                    print(f"{found}  {of_training}", flush=True)
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
