"""Fits the arrays of each form to the outputs of a layer. NumPy only.

The forms "separable" and "tucker" are one problem: the window falls into blocks (its columns, or its positions), whose
inputs pass through one matrix U for all blocks, and then through a matrix F_b of each block: W_b ~ U F_b. With U fixed,
the best F is a least-squares fit; with F fixed, so is U.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from prunekit.techniques.factorize.forms import CHANNELS, PAIR, SEPARABLE, TUCKER, Factors, Layout, Structure
from prunekit.techniques.factorize.low_rank import directions_of

# Ranks of the first layer whose errors are found: so many in equal ratios, and twice as many in equal steps.
_RANKS = 10
# Alternations of the fit, and steps of conjugate gradients in each.
_SWEEPS, _STEPS = 4, 8
# Squared inputs times outputs of a weight up to which the errors have alternations, too: a second or two for all ranks.
_CHEAP = 3e8
# Share of the mean diagonal of the products by which a fit is drawn to the values before.
_DAMPING = 1e-4
# Returns what becomes of a matrix, from it and the products X^T X of its inputs.
Change = Callable[[np.ndarray, np.ndarray], np.ndarray]


class WindowForms:
    """The forms of one weight.

    Args:
        gram: X^T X of the layer's inputs, shape (inputs, inputs); or its diagonal, shape (inputs,).
        matrix: The weight, shape (inputs, outputs), float64.
        layout: Its axes.
    """

    def __init__(self, gram: np.ndarray, matrix: np.ndarray, layout: Layout):
        self._gram, self._matrix, self._layout = gram, matrix, layout
        self._taken_apart: dict[str, _Blocks] = {}
        self._found: dict[Structure, tuple[np.ndarray, np.ndarray]] = {}

    def errors(self, forms: Sequence[str]) -> dict[Structure, float]:
        """Returns the squared error of the outputs for the ranks of each form: those of "pair" and "channels" exactly.

        "separable" and "tucker" have fewer alternations, for some ranks of U; `factors` then loses less.
        """
        found: dict[Structure, float] = {}
        for form in forms:
            if form in (PAIR, CHANNELS):
                dropped = self._blocks(form).start.dropped()[1:]
                found |= {Structure(form, (rank,)): float(error) for rank, error in enumerate(dropped, start=1)}
                continue
            blocks = self._blocks(form)
            for rank in _some(self._most(form)):
                found |= blocks.errors(rank) if form == TUCKER else blocks.error(rank)
        return found

    def _most(self, form: str) -> int:
        """Returns the largest rank of the first layer that can make the weight smaller, at least 1."""
        layout = self._layout
        each = layout.parameters(layout.of_rank(form, 1)) if form == SEPARABLE else layout.inputs
        most = (layout.parameters(None) - 1) // each
        return max(min(most, layout.full(form).ranks[0]), 1)

    def factors(self, structure: Structure) -> Factors:
        """Returns the arrays of a form."""
        entry, rest = self._entry_and_rest(structure)
        if structure.form != TUCKER:
            return self._shaped(structure, entry, rest)
        outputs = directions_of(self._blocks(TUCKER).products(entry), rest)
        core, outer = outputs.factors(rest, structure.ranks[-1])
        return self._shaped(structure, entry, core, outer)

    def changed(self, structure: Structure, change: Change) -> Factors:
        """Returns the two arrays of a form, changed one after the other: the second is fitted to the changed first.

        Args:
            structure: A form of two arrays.
            change: Returns what a matrix becomes, such as its rounded values.
        """
        blocks = self._blocks(structure.form)
        entry, rest = self._entry_and_rest(structure)
        entry = change(entry, blocks.shared)
        rest, _ = blocks.fitted(entry, rest)
        return self._shaped(structure, entry, change(rest, blocks.products(entry)))

    def _entry_and_rest(self, structure: Structure) -> tuple[np.ndarray, np.ndarray]:
        """Returns U and F, which are found once: several changes begin with them."""
        if structure not in self._found:
            blocks, first = self._blocks(structure.form), structure.ranks[0]
            if structure.form in (PAIR, CHANNELS):
                self._found[structure] = blocks.begin(first)
            else:
                last = structure.ranks[-1] if structure.form == TUCKER else None
                self._found[structure] = blocks.alternated(first, last)
        return self._found[structure]

    def _shaped(self, structure: Structure, *matrices: np.ndarray) -> Factors:
        shapes = self._layout.shapes(structure)
        return Factors(structure.form, tuple(one.reshape(shape) for one, shape in zip(matrices, shapes, strict=True)))

    def _blocks(self, form: str) -> _Blocks:
        # "pair" and "channels" have all rows in one block.
        kind = form if form in (SEPARABLE, TUCKER) else PAIR
        if kind not in self._taken_apart:
            gram, matrix, layout = self._gram, self._matrix, self._layout
            count = layout.positions if kind == TUCKER else 1
            if kind == SEPARABLE:
                rows, count = layout.window
                order = np.arange(len(matrix)).reshape(rows, count, -1).transpose(1, 0, 2).reshape(-1)
                gram = gram[order] if gram.ndim == 1 else gram[np.ix_(order, order)]
                matrix = matrix[order]
            self._taken_apart[kind] = _Blocks(gram, matrix, count)
        return self._taken_apart[kind]


class _Fitted(NamedTuple):
    """U, F, F of the rank that is wanted, and the squared error with that."""

    entry: np.ndarray
    rest: np.ndarray
    cut: np.ndarray
    error: float


class _Blocks:
    """Fits W_b ~ U F_b, one U for all blocks b of the rows of a weight.

    Args:
        gram: Shape (rows, rows), or its diagonal.
        matrix: Shape (rows, outputs); the rows of one block follow one another.
        count: Number of blocks.

    Attributes:
        shared: X^T X of the inputs of U: the sum over the blocks.
        start: Directions of what all blocks compute.
    """

    def __init__(self, gram: np.ndarray, matrix: np.ndarray, count: int):
        self._gram, self._matrix, self._count = gram, matrix, count
        rows, outputs = len(matrix) // count, matrix.shape[1]
        split = matrix.reshape(count, rows, outputs)
        self._wide = split.transpose(1, 0, 2).reshape(rows, -1)
        if count == 1:
            self.shared = gram
        elif gram.ndim == 1:
            self.shared = gram.reshape(count, rows).sum(axis=0)
        else:
            self.shared = np.einsum("bibj->ij", gram.reshape(count, rows, count, rows))
        self.start = directions_of(self.shared, self._wide)
        self._curved = self._times(matrix)
        self._energy = float(np.sum(matrix * self._curved))

    def begin(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (U, F) of the leading directions, as if the inputs of different blocks were unrelated.

        Returns:
            Shapes (rows of a block, rank) and (blocks * rank, outputs).
        """
        entry, rest = self.start.factors(self._wide, rank)
        return entry, rest.reshape(rest.shape[0], self._count, -1).transpose(1, 0, 2).reshape(-1, self._matrix.shape[1])

    def products(self, entry: np.ndarray) -> np.ndarray:
        """Returns the products of the values behind U, shape (blocks * rank, blocks * rank)."""
        rank = entry.shape[1]
        return np.matmul(entry.T, self._behind(entry)).reshape(self._count * rank, -1)

    def fitted(self, entry: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns the F of the least squared error for this U, and the error."""
        inner = self.products(entry)
        wanted = self._projected(entry, self._curved)
        damping = _DAMPING * float(np.trace(inner)) / len(inner) or 1.0
        found = rest + np.linalg.solve(inner + damping * np.eye(len(inner)), wanted - inner @ rest)
        error = self._energy - 2 * float(np.sum(wanted * found)) + float(np.sum(found * (inner @ found)))
        return found, max(error, 0.0)

    def error(self, rank: int) -> dict[Structure, float]:
        """Returns the error of the form "separable" with a rank."""
        return {Structure(SEPARABLE, (rank,)): self._alternated(rank, None, self._few).error}

    def errors(self, rank: int) -> dict[Structure, float]:
        """Returns the errors of the form "tucker" with `rank` inputs of the window and each number of outputs."""
        found = self._alternated(rank, None, self._few)
        dropped = directions_of(self.products(found.entry), found.rest).dropped()[1:]
        return {Structure(TUCKER, (rank, last)): found.error + float(one) for last, one in enumerate(dropped, start=1)}

    @property
    def _few(self) -> int:
        """Alternations for each rank whose error is found."""
        return _SWEEPS // 2 if len(self._matrix) * self._matrix.size <= _CHEAP else 0

    def alternated(self, rank: int, last: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns (U, F) after alternate fits of both; F is fitted for itself, U for an F of rank `last`."""
        found = self._alternated(rank, last, _SWEEPS)
        return self._balanced(found.entry, found.rest)

    def _alternated(self, rank: int, last: int | None, sweeps: int) -> _Fitted:
        best = self._cut(*self.begin(rank), last)
        for _ in range(sweeps):
            found = self._cut(self._moved(best.entry, best.cut), best.cut, last)
            if found.error >= best.error:
                break
            best = found
        return best

    def _cut(self, entry: np.ndarray, rest: np.ndarray, last: int | None) -> _Fitted:
        """Returns the fit of F for a U, and what is left of it with rank `last`."""
        rest, error = self.fitted(entry, rest)
        if last is None:
            return _Fitted(entry, rest, rest, error)
        outputs = directions_of(self.products(entry), rest)
        core, outer = outputs.factors(rest, last)
        return _Fitted(entry, rest, core @ outer, error + float(outputs.dropped()[last]))

    def _moved(self, entry: np.ndarray, rest: np.ndarray) -> np.ndarray:
        """Returns a better U for this F, by some steps of conjugate gradients."""
        split = rest.reshape(self._count, entry.shape[1], -1)

        def back(rows: np.ndarray) -> np.ndarray:
            return np.einsum("bno,bro->nr", rows.reshape(self._count, -1, rows.shape[1]), split, optimize=True)

        left = back(self._curved - self._times(_product(entry, split)))
        step, size = left, float(np.sum(left * left))
        for _ in range(_STEPS):
            curved = back(self._times(_product(step, split)))
            bend = float(np.sum(step * curved))
            if bend <= 0:
                break
            entry, left = entry + size / bend * step, left - size / bend * curved
            after = float(np.sum(left * left))
            step, size = left + after / max(size, 1e-300) * step, after
        return entry

    def _balanced(self, entry: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns both with each value between them as large as what F makes of it: integers lose little so."""
        split = rest.reshape(self._count, entry.shape[1], -1)
        weighed = self.shared[:, None] * entry if self.shared.ndim == 1 else self.shared @ entry
        sizes = np.sqrt(np.maximum(np.sum(entry * weighed, axis=0), 0.0))
        norms = np.sqrt(np.square(split).sum(axis=(0, 2)))
        known = (sizes > 1e-12 * sizes.max(initial=0.0)) & (norms > 1e-12 * norms.max(initial=0.0))
        scales = np.sqrt(np.divide(norms, sizes, out=np.ones_like(norms), where=known))
        scales = np.where(known, scales / max(scales.max(initial=0.0), 1e-30), 1.0)
        return entry * scales, (split / scales[None, :, None]).reshape(rest.shape)

    def _times(self, rows: np.ndarray) -> np.ndarray:
        return self._gram[:, None] * rows if self._gram.ndim == 1 else self._gram @ rows

    def _behind(self, entry: np.ndarray) -> np.ndarray:
        """Returns X^T Z of the inputs X and the values Z behind U, shape (blocks, rows, blocks * rank)."""
        count, (rows, rank) = self._count, entry.shape
        if self._gram.ndim > 1:
            return np.matmul(self._gram.reshape(-1, count, rows), entry).reshape(count, rows, count * rank)
        found = np.zeros((count, rows, count, rank))
        for block, weights in enumerate(self._gram.reshape(count, rows)):
            found[block, :, block] = weights[:, None] * entry
        return found.reshape(count, rows, count * rank)

    def _projected(self, entry: np.ndarray, rows: np.ndarray) -> np.ndarray:
        split = rows.reshape(self._count, len(entry), -1)
        return np.matmul(entry.T, split).reshape(-1, rows.shape[1])


def _product(entry: np.ndarray, split: np.ndarray) -> np.ndarray:
    return np.matmul(entry, split).reshape(-1, split.shape[-1])


def _some(most: int) -> list[int]:
    return sorted({round(one) for one in (*np.geomspace(1, most, _RANKS), *np.linspace(1, most, 2 * _RANKS))})
