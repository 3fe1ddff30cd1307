"""What is asked of a search, and the files that may answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prunekit.delivery.reports.formatting import latency
from prunekit.searching.building import Built
from prunekit.searching.costs import ARENA, Mixture
from prunekit.sparsity.shorthands import SearchProfile

# What each profile minimises: a cost.
MINIMISED = {"small": "bytes", "balanced": "balanced", "fast": "latency"}


@dataclass(frozen=True)
class Question:
    """What is asked for.

    Attributes:
        drop: By how much the metric may become worse; None: the drop is what is minimised.
        bytes: Most bytes of the file, or None.
        latency: Most seconds of a call, or None.
        profile: What is minimised within a drop.
        arena: Most bytes for activations, or None.
    """

    drop: float | None = None
    bytes: int | None = None
    latency: float | None = None
    profile: SearchProfile = "small"
    arena: int | None = None

    @property
    def costs(self) -> dict[str, float]:
        """The bounds besides the drop: "bytes", "latency" and "arena" -> the most."""
        given = {"bytes": self.bytes, "latency": self.latency, ARENA: self.arena}
        return {name: float(most) for name, most in given.items() if most is not None}

    @property
    def is_timed(self) -> bool:
        """True if latencies count."""
        return self.latency is not None or self.profile != "small"

    def __str__(self) -> str:
        found = [] if self.drop is None else [f"drop={self.drop:g}"]
        found += [] if self.bytes is None else [f"bytes={self.bytes:,}"]
        found += [] if self.latency is None else [f"latency={latency(self.latency)}"]
        found += [] if self.arena is None else [f"arena={self.arena:,}"]
        return " and ".join(found)


@dataclass(eq=False)
class Made:
    """A mixture whose file was made, run and measured.

    Attributes:
        mixture: What was chosen.
        built: The file; of files that will not be delivered without model and outputs.
        drops: By how much the metric is worse: on the examples for the choice, and on those that judge.
        error: Squared error of its outputs on the examples for the choice.
        bytes: Bytes of the file, as the target counts them.
        seconds: Seconds of one call of the file; None if they were not measured.
        arena: Bytes for its activations; None if they were not measured.
        is_trained: True if the mixture was trained.
    """

    mixture: Mixture
    built: Built | None
    drops: tuple[float, float]
    error: float
    bytes: int
    seconds: float | None = None
    arena: int | None = None
    is_trained: bool = False

    @property
    def costs(self) -> dict[str, float]:
        """The measured costs."""
        found = {"bytes": self.bytes, "latency": self.seconds, ARENA: self.arena}
        return {name: float(value) for name, value in found.items() if value is not None}

    def meets(self, bounds: Mapping[str, float]) -> bool:
        """Returns True if no measured cost is above its bound."""
        return all(self.costs[name] <= most for name, most in bounds.items())

    def __str__(self) -> str:
        return " and ".join(cost_text(name, value) for name, value in self.costs.items())


def cost_text(cost: str, value: float) -> str:
    """Returns a cost in words: "2.10 ms", "9,000 bytes of arena"."""
    if cost == "latency":
        return latency(value)
    return f"{value:,.0f} bytes{' of arena' if cost == ARENA else ''}"
