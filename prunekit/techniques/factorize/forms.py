"""Forms of low rank: the small arrays whose product stands in the place of a weight. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Two matrices; of a convolution: the whole window to few channels, then 1 x 1.
PAIR, CHANNELS = "pair", "channels"
# Columns of the window to few channels, then rows; 1 x 1 to few channels, the window on these, 1 x 1.
SEPARABLE, TUCKER = "separable", "tucker"
# Arrays -> the weight. Of a window: a its rows, b its columns, p all positions; c inputs, k all inputs, o outputs.
_EQUATIONS = {
    PAIR: (("kr", "ro"), "ko"),
    CHANNELS: (("kr", "ro"), "ko"),
    SEPARABLE: (("acr", "bro"), "abco"),
    TUCKER: (("cr", "prs", "so"), "pco"),
}


@dataclass(frozen=True)
class Structure:
    """The form of a factorized weight.

    Attributes:
        form: "pair", "channels", "separable" or "tucker".
        ranks: Number of values between its layers, from the first one on: one, and two for "tucker".
    """

    form: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The axes of a weight as a product sees them.

    Attributes:
        window: Sizes of the window of a convolution; () for other layers.
        inputs: Inputs at each position of the window.
        outputs: Outputs.
    """

    window: tuple[int, ...]
    inputs: int
    outputs: int

    @property
    def positions(self) -> int:
        """Number of positions of the window."""
        return math.prod(self.window)

    def forms(self) -> tuple[str, ...]:
        """Returns the forms that the weight can have."""
        if not self.window:
            return (PAIR,)
        if self.positions == 1:
            return (CHANNELS,)
        return (CHANNELS, SEPARABLE, TUCKER) if self._is_area() else (CHANNELS, TUCKER)

    def _is_area(self) -> bool:
        return len(self.window) == 2 and min(self.window) > 1

    def refusal(self, form: str) -> str | None:
        """Returns why a convolution cannot have a form; None if it can, and for layers with one form alone."""
        if form in self.forms() or len(self.forms()) == 1:
            return None
        size = " x ".join(map(str, self.window))
        return f"its window of {size} has no two sides above 1 that a separable form could take apart"

    def asked(self, form: str) -> tuple[str, ...]:
        """Returns the forms that the weight may take if `form` is asked for: all for "auto", the only one, or that."""
        possible = self.forms()
        return possible if form == "auto" or len(possible) == 1 else (form,)

    def of_rank(self, form: str, rank: int) -> Structure:
        """Returns a form with one number for all ranks; of "tucker", at most the inputs and the outputs."""
        if form == TUCKER:
            return Structure(form, (min(rank, self.inputs), min(rank, self.outputs)))
        return Structure(form, (rank,))

    def full(self, form: str) -> Structure:
        """Returns a form with the ranks at which it can be any weight."""
        if form == TUCKER:
            return Structure(form, (self.inputs, self.outputs))
        if form == SEPARABLE:
            return Structure(form, (min(self.window[0] * self.inputs, self.window[1] * self.outputs),))
        return Structure(form, (min(self.positions * self.inputs, self.outputs),))

    def shapes(self, structure: Structure) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the arrays of a form."""
        first, last = structure.ranks[0], structure.ranks[-1]
        if structure.form == TUCKER:
            return (self.inputs, first), (self.positions, first, last), (last, self.outputs)
        if structure.form == SEPARABLE:
            return (self.window[0], self.inputs, first), (self.window[1], first, self.outputs)
        return (self.positions * self.inputs, first), (first, self.outputs)

    def parameters(self, structure: Structure | None) -> int:
        """Returns the number of entries of the arrays of a form; None = of the weight itself."""
        if structure is None:
            return self.positions * self.inputs * self.outputs
        return sum(math.prod(shape) for shape in self.shapes(structure))


@dataclass(frozen=True, eq=False)
class Factors:
    """The arrays of a form.

    Attributes:
        form: "pair", "channels", "separable" or "tucker".
        arrays: The arrays in the order in which their layers compute, float64, shapes as in `Layout.shapes`.
    """

    form: str
    arrays: tuple[np.ndarray, ...]

    @property
    def matrix(self) -> np.ndarray:
        """The weight that they stand for, shape (inputs, outputs), rows in the order of `LayerProduct`."""
        letters, whole = _EQUATIONS[self.form]
        found = np.einsum(f"{','.join(letters)}->{whole}", *self.arrays, optimize=True)
        return found.reshape(-1, found.shape[-1])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of values between their layers."""
        return tuple(one.shape[-1] for one in self.arrays[:-1])

    @property
    def size(self) -> int:
        """Number of entries of all arrays."""
        return sum(array.size for array in self.arrays)

    def chained(self, gradient: np.ndarray, *, squared: bool = False) -> list[np.ndarray]:
        """Returns the gradients of the arrays from that of the weight, by the chain rule.

        Args:
            gradient: Of the weight, shape (inputs, outputs).
            squared: True: averages of squares, as if the gradients of the weight's entries were independent.
        """
        letters, whole = _EQUATIONS[self.form]
        arrays = [np.square(one) for one in self.arrays] if squared else list(self.arrays)
        lengths = {
            one: n
            for word, array in zip(letters, arrays, strict=True)
            for one, n in zip(word, array.shape, strict=True)
        }
        given = gradient.reshape([lengths[one] for one in whole])
        found = []
        for place, own in enumerate(letters):
            others = [*letters[:place], *letters[place + 1 :]]
            operands: Sequence[np.ndarray] = [*arrays[:place], *arrays[place + 1 :]]
            found.append(np.einsum(f"{','.join([whole, *others])}->{own}", given, *operands, optimize=True))
        return found


def empty_factors(layout: Layout, structure: Structure, seed: int) -> Factors:
    """Returns factors with random entries, to measure a size: a file keeps one copy of equal weights."""
    draw = np.random.default_rng(seed)
    return Factors(structure.form, tuple(draw.normal(size=shape) for shape in layout.shapes(structure)))
