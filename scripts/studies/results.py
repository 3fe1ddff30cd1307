"""Results of a study in a JSON file: written after each measurement, and never measured twice."""

import json
import os
from collections.abc import Callable
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
            partial.write_text(json.dumps(self.values, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            partial.replace(self._path)
        return self.values[key]
