"""Results of a study in a JSON file: written after each measurement, and never measured twice."""

import argparse
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any


class Results:
    """Measured values by key.

    Args:
        path: The JSON file; created with the first value.
    """

    def __init__(self, path: Path):
        self._path = path
        self.values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """Returns the value of a key; measures and stores it if it is missing."""
        if key not in self.values:
            value = measure()
            # Several processes may write the file in turns.
            if self._path.exists():
                self.values |= json.loads(self._path.read_text(encoding="utf-8"))
            self.values[key] = value
            partial = self._path.with_suffix(f".{os.getpid()}")
            partial.write_text(one_a_line(self.values), encoding="utf-8")
            partial.replace(self._path)
        return self.values[key]

    def of(self, networks: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
        """Yields (name, title, values) of each network that was measured.

        Args:
            networks: {name: title}.
        """
        for name, title in networks.items():
            if found := self.values.get(name):
                yield name, title, found


def one_a_line(values: Mapping[str, Any]) -> str:
    """Returns JSON with one measurement a line, sorted, which can be searched and compared line by line."""
    rows = (f" {json.dumps(key)}: {json.dumps(values[key], sort_keys=True)}" for key in sorted(values))
    return "{\n" + ",\n".join(rows) + "\n}\n"


def measure_networks(
    doc: str | None,
    networks: Collection[str],
    path: Path,
    measure: Callable[[str], Any],
    page: Callable[[Results], str],
) -> None:
    """Measures the networks that the command line names and that are not measured yet, and writes the page.

    Args:
        doc: What the command does, for its help.
        networks: Names of the networks, or of runs.
        path: The page; the results are beside it, with the ending ".json".
        measure: Returns the figures of a network.
        page: Returns the page as Markdown.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument(
        "--only", metavar="NAME", choices=list(networks), help=f"one of: {'; '.join(networks)}".replace("%", "%%")
    )
    only = parser.parse_args().only
    results = Results(path.with_suffix(".json"))
    for name in networks:
        if only in (None, name):
            results.get(name, lambda name=name: measure(name))
            path.write_text(page(results), encoding="utf-8")
