"""Divides a scan among the nodes of a Ray cluster; each of them walks through the model for some weights and groups."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.runtime.ray_tasks import by_ray, failure_text, thread_variables
from prunekit.searching.judge import batched
from prunekit.searching.repaired_scan import RepairedScan
from prunekit.searching.searched_model import SearchedModel
from prunekit.searching.table import Levels, Table, missing, scan
from prunekit.searching.time_limit import NO_LIMIT, TimeLimit
from prunekit.techniques.quantize.options import QuantizationOptions

# Examples of a batch, and fewest of one to which layers are fitted.
_FITTED, _MEASURED, _LEAST = 64, 128, 4
# Most parts; each computes the calls before its first weight again.
_PARTS = 16
PURPOSE = "a search"


@dataclass(frozen=True, eq=False)
class ScanInputs:
    """What a scan reads.

    Attributes:
        model: The model.
        fitted: Inputs to which layers are fitted.
        measured: Inputs on which outputs are compared.
        levels: The levels.
        memory: Largest number of bytes of activations that are kept.
        options: How the model is quantized.
        limit: When the measurements end.
    """

    model: Any
    fitted: Any
    measured: Any
    levels: Levels
    memory: float
    options: QuantizationOptions
    limit: TimeLimit = NO_LIMIT

    def examples(self, subject: SearchedModel) -> int:
        """Returns to how many examples the layers behind a change are fitted if it reaches the whole model.

        What that computes, before and after the change, has to fit into memory.
        """
        count = len(keras.tree.flatten(self.fitted)[0])
        return int(min(count, max(_LEAST, self.memory // (2 * sum(subject.activation_bytes)))))

    def measure(self, subject: SearchedModel) -> RepairedScan:
        """Returns the walk through the model."""
        size = min(_FITTED, self.examples(subject))
        batches = batched(self.fitted, size), batched(self.measured, _MEASURED)
        return RepairedScan(
            self.model, *batches, list(subject.products.values()), self.memory, subject.activation_bytes
        )


def scan_part(inputs: ScanInputs, names: Sequence[str]) -> tuple[Table, list[str]]:
    """Returns the rows of some weights and groups, and those that there was no time for."""
    if not inputs.limit.left:
        return Table(), list(names)
    subject = SearchedModel(inputs.model, inputs.fitted, inputs.options)
    measure = functools.partial(inputs.measure, subject)
    return scan(subject, measure, inputs.levels, Table(), lambda _: None, only=names, limit=inputs.limit)


def scan_by_ray(
    subject: SearchedModel,
    inputs: ScanInputs,
    known: Table,
    keep: Callable[[Table], None],
    progress: Progress,
    only: Collection[str] | None = None,
) -> tuple[Table, list[str]]:
    """Returns a table with the rows that nodes measured, and a note for each cause of failure; arguments as for `scan`.

    Raises:
        ImportError: Ray is not installed.
    """
    names = [name for name in missing(subject, known) if only is None or name in only]
    count = min(_PARTS, len(names))
    if math.isinf(inputs.limit.end):
        parts = [names[len(names) * i // count : len(names) * (i + 1) // count] for i in range(count)]
    else:
        # The largest first, wherever parts have to wait for a processor.
        names.sort(key=subject.entries_of, reverse=True)
        parts = [names[i::count] for i in range(count)]
    failed: dict[str, list[str]] = {}
    total, table = len(missing(subject, Table())), known
    calls = by_ray(scan_part, parts, purpose=PURPOSE, shared=inputs, cpus=1, variables=thread_variables(1))
    with contextlib.closing(calls):
        for index, found in calls:
            if isinstance(found, Exception):
                failed.setdefault(failure_text(found), []).extend(parts[index])
                continue
            rows, _ = found
            table = replace(table, weights=(*table.weights, *rows.weights), removals=(*table.removals, *rows.removals))
            keep(table)
            progress(total - len(missing(subject, table)), total, ", ".join(parts[index]))
    notes = [
        f"Nodes could not measure {', '.join(names)}, which were left to this machine: {text}"
        for text, names in failed.items()
    ]
    return table, notes
