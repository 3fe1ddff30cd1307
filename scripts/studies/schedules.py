"""What small networks keep after gradual pruning with schedules of different begin, end and number of mask updates."""

import argparse
import statistics
import warnings
from pathlib import Path
from typing import Any

import keras

import prunekit as pk
from studies.kinds import KINDS, score, trained
from studies.results import Results

SEEDS, SPARSITY, BATCH = range(3), 0.9, 64
#: Epochs after the training of the dense network; the training itself for "from the first step on".
LATER, NETWORKS = 8, ("digits-cnn", "depthwise", "regression", "text", "mixer")
#: Begin and end as shares of the training, and the number of mask updates; None: one at every step.
ROWS: list[tuple[float, float, int | None]] = [
    (0.0, 0.5, 60),
    (0.0, 0.67, 60),
    (0.0, 0.75, 60),
    (0.0, 0.9, 60),
    (0.1, 0.75, 60),
    (0.25, 0.75, 60),
    (0.0, 0.75, 10),
    (0.0, 0.75, 300),
    (0.0, 0.75, None),
]
TRAININGS = {"trained before": LATER, "from the first step on": None}
PAGE = Path("docs/measured/schedules.md")
HEAD = f"""# Measured: schedules

What networks keep with {SPARSITY:.0%} zeros after a `pk.schedules.PolynomialDecay` from 0, by its begin and end as
shares of the training, and by the number of mask updates: mean of the seeds that were measured,
at most {len(SEEDS)}, of the networks of [defaults](defaults.md).
"Trained before": {LATER} epochs more of the trained network, learning rate 0.001. "From the first step on": the
network's own training, whose learning rate falls to a fifth after 70 % of the epochs. Criterion and allocation are the
defaults of `pk.PruningCallback`. A schedule without `end_step` and `frequency` takes the row in bold.
`scripts/study schedules` makes this page.
"""
#: The row that `PolynomialDecay` takes by itself.
DEFAULT = (0.0, 0.75, 60)


def measured(name: str, epochs: int | None, row: tuple[float, float, int | None], seed: int) -> float:
    """Returns what a network keeps.

    Args:
        name: A network of `KINDS`.
        epochs: Epochs after its training; None for its own training.
        row: Begin, end and number of updates.
        seed: Of weights and batches.
    """
    kind = KINDS[name]
    inputs, labels = kind.data()[0]
    model = trained(name) if epochs else _new(kind, seed)
    total = epochs or kind.epochs
    steps = total * -(-len(inputs) // BATCH)
    begin, end = round(row[0] * steps), round(row[1] * steps)
    frequency = 1 if row[2] is None else max(1, (end - begin) // row[2])
    schedule = pk.schedules.PolynomialDecay(0.0, SPARSITY, begin, end, frequency=frequency)
    callbacks: list[Any] = [pk.PruningCallback(schedule)]
    rate = 0.001 if epochs else 0.002
    if not epochs:
        callbacks.append(
            keras.callbacks.LearningRateScheduler(lambda epoch: rate * (0.2 if epoch > 0.7 * total else 1))
        )
    keras.utils.set_random_seed(seed)
    model.compile(keras.optimizers.Adam(rate), kind.loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model.fit(inputs, labels, epochs=total, batch_size=BATCH, verbose=0, callbacks=callbacks)
    return score(name, model)


def _new(kind: Any, seed: int) -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    return kind.build()


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    parts = [HEAD]
    for training in TRAININGS:
        parts += [
            f"\n## {training.capitalize()}\n",
            f"| begin | end | updates | {' | '.join(KINDS[name].title for name in NETWORKS)} | mean |",
            "|---|---|---|" + "---:|" * (len(NETWORKS) + 1),
        ]
        for row in ROWS:
            means = [_mean(results, name, training, row) for name in NETWORKS]
            of_all = None if None in means else statistics.mean(value for value in means if value is not None)
            cells = ["–" if value is None else f"{value:.4f}" for value in (*means, of_all)]
            shown = [f"{row[0]:g}", f"{row[1]:g}", "every step" if row[2] is None else str(row[2])]
            if row == DEFAULT:
                shown = [f"**{cell}**" for cell in shown]
            parts.append(f"| {' | '.join([*shown, *cells])} |")
    return "\n".join(parts) + "\n"


def _mean(results: Results, name: str, training: str, row: Any) -> float | None:
    values = [results.values.get(_key(name, training, row, seed)) for seed in SEEDS]
    found = [value for value in values if value is not None]
    return statistics.mean(found) if found else None


def _key(name: str, training: str, row: Any, seed: int) -> str:
    return f"{name} / {training} / {row[0]:g} / {row[1]:g} / {row[2] or 'every step'} / {seed}"


def main() -> None:
    """Measures what is missing, and writes the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    results = Results(PAGE.with_suffix(".json"))
    for seed in SEEDS:
        for name in NETWORKS:
            for training, epochs in TRAININGS.items():
                for row in ROWS:
                    found = results.get(
                        _key(name, training, row, seed),
                        lambda case=(name, epochs, row, seed): measured(*case),
                    )
                    print(f"{found:.4f}  {_key(name, training, row, seed)}", flush=True)
            PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
