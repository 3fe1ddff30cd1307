"""Options of a reduced dimension: which dimension, and how many entries are left."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from prunekit.techniques.factorize.dimension.modes import Mode

# Names of dimensions of (batch, windows, features).
AXES = {"windows": 1, "features": -1}


@dataclass(frozen=True)
class DimensionOptions:
    """Which dimension is reduced, and to how many entries.

    Args:
        size: Number of entries that are left.
        energy: Share of the squared deviations from the means that is kept, such as 0.99. One of the two is given.
        axis: "features" (the last dimension), "windows" (the one after the batch), or a number: 1 is the first after
            the batch, -1 the last.
        restore: In a model: True adds a second layer that gives the dimension its length back, so that all layers
            behind stay as they are.

    Raises:
        ValueError, TypeError: An option has a value that is not listed here.
    """

    size: int | None = None
    energy: float | None = None
    axis: int | str = "features"
    restore: bool = True

    def __post_init__(self) -> None:
        if (self.size is None) == (self.energy is None):
            raise ValueError(
                "`size` or `energy` says how many entries are left. Received: "
                f"{'both' if self.size is not None else 'neither'}. Pass one, such as size=16 or energy=0.99."
            )
        if self.size is not None and (not isinstance(self.size, Integral) or isinstance(self.size, bool)):
            raise TypeError(f"`size` is the number of entries that are left, an int. Received: {self.size!r}.")
        if self.size is not None and self.size < 1:
            raise ValueError(f"`size` is the number of entries that are left, from 1. Received: {self.size}.")
        if self.energy is not None:
            known = isinstance(self.energy, Real) and not isinstance(self.energy, bool)
            if not known or not 0 < self.energy < 1:
                raise ValueError(
                    "`energy` is the share of the squared deviations from the means that is kept, above 0 and below 1. "
                    f"Received: {self.energy!r}."
                )
        if isinstance(self.axis, str) and self.axis not in AXES:
            raise ValueError(f'`axis` is "features", "windows" or a number. Received: {self.axis!r}.')
        if not isinstance(self.axis, str | int) or isinstance(self.axis, bool):
            raise TypeError(f'`axis` is "features", "windows" or a number. Received: {self.axis!r}.')
        if not isinstance(self.restore, bool):
            raise ValueError(f"`restore` is True or False. Received: {self.restore!r}.")

    def axis_of(self, rank: int) -> int:
        """Returns the number of the dimension, from 1, of tensors with so many dimensions.

        Raises:
            ValueError: There is no such dimension, or it is the batch; the tensors have fewer than three.
        """
        if rank < 3:
            raise ValueError(
                "A dimension is reduced of tensors with three or more, such as (batch, windows, features). Received: "
                f"{rank} dimensions. For (batch, features), use a Dense layer."
            )
        number = AXES[self.axis] if isinstance(self.axis, str) else self.axis
        found = number + rank if number < 0 else number
        if not 0 < found < rank:
            raise ValueError(
                f"`axis` is a dimension of the tensor, which has {rank}, and not the batch. Received: {self.axis!r}."
            )
        return found

    def size_of(self, mode: Mode) -> int:
        """Returns how many entries are left.

        Raises:
            ValueError: The dimension has fewer.
        """
        length = len(mode.means)
        if self.size is None:
            return mode.size_for(float(self.energy or 0.0))
        if self.size > length:
            raise ValueError(
                f"The dimension has {length} entries, and fewer are left. Received: size={self.size}. Pass a smaller "
                "size, or another `axis`."
            )
        return int(self.size)
