"""Values that weights would have with zeros, few bits and low rank, and what a removal of channels changes.

Each is fitted to the outputs of its layer on the inputs of the model as it is, as `pk.prune`, `pk.quantize` and
`pk.shrink` fit them. The model is not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channels import Channels
from prunekit.anatomy.channels.weight_entries import masked, zeroed
from prunekit.anatomy.layers.targets import Target, find_targets
from prunekit.core.layerwise.layer_fit import LayerFit, Solution
from prunekit.core.statistics.layer_inputs import LayerMoments
from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.reconstruction import DAMPING, curvatures, damped_hessian, thin
from prunekit.sparsity.selection import keep_largest_of_array, pruned_count
from prunekit.techniques.factorize.forms import Factors, Layout, Structure
from prunekit.techniques.factorize.layer_factors import relative
from prunekit.techniques.factorize.window_forms import WindowForms
from prunekit.techniques.quantize.grids.grids import Grid
from prunekit.techniques.quantize.rounding.gptq import OrderedFactor, ordered_factor
from prunekit.techniques.quantize.rounding.rate import priced, rated_matrix

# Rounds in which the weights of a layer are removed, as the criterion "output_error" does.
_ROUNDS = 16
# Largest shares of a weight's entries that its factors may have; and the largest squared error of the layer's outputs,
# relative to the outputs, at which a rank is measured: 3 bits for each entry make about as much.
FACTOR_SHARES = (0.7, 0.5, 0.35, 0.25, 0.15, 0.08)
_WORST_ERROR = 0.05

Values = list[tuple[Any, np.ndarray]]


@dataclass(frozen=True)
class Level:
    """What is done with one weight.

    Attributes:
        sparsity: Share of its entries that become zero.
        bits: Bits of its codes; None = floating point.
        rate: Price of a bit, as for `pk.quantize`.
        structure: Form and rank of the arrays in its place; None = the weight itself.
    """

    sparsity: float = 0.0
    bits: int | None = None
    rate: float = 0.0
    structure: Structure | None = None

    @property
    def techniques(self) -> frozenset[str]:
        """The techniques that make it, names of `pk.search`."""
        used = {
            "factorize": self.structure is not None,
            "quantize": (self.bits, self.rate) != (8, 0.0),
            "prune": self.sparsity > 0,
        }
        return frozenset(name for name, is_used in used.items() if is_used)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A weight at one level.

    Attributes:
        level: The level.
        values: New values, as (variable, array): of the weight and of its layer's bias.
        entropies: Bits of an entry by the frequencies of the codes, zeros included; 32 in floating point. One number,
            and for a weight of low rank one for each of its arrays.
    """

    level: Level
    values: Values
    entropies: tuple[float, ...]


def candidates(
    layer: LayerLevels, levels: Sequence[Level], grid_of: Callable[[np.ndarray, int], Grid]
) -> Iterator[Candidate]:
    """Yields a weight at each of some levels with the same zeros, fitted to the outputs of its layer.

    Args:
        layer: The weight.
        levels: The levels; where the products are not sums, as those of an embedding, those with a price of bits are
            left out.
        grid_of: Returns the grid for a kernel and so many bits.
    """
    pruned = layer.pruned(levels[0].sparsity)
    for level in levels:
        if level.rate and layer.product.diagonal:
            continue
        if level.bits is None:
            yield Candidate(level, layer.values(pruned), (_float_bits(pruned),))
            continue
        grid, price = priced(grid_of(layer.kernel(pruned), level.bits), level.rate)
        rounded = layer.rounded(pruned, grid, price)
        yield Candidate(level, layer.values(rounded), (entropy(grid.codes(layer.kernel(rounded))),))


def low_rank_candidates(
    layer: LayerLevels, layout: Layout, levels: Sequence[Level], grid_of: Callable[[np.ndarray, int], Grid]
) -> Iterator[Candidate]:
    """Yields a weight as two arrays of low rank, at each level, fitted to the outputs of its layer.

    Args:
        layer: The weight.
        layout: Its axes.
        levels: Bits and prices of bits of both arrays; in floating point none.
        grid_of: Returns the grid for a matrix and so many bits.
    """
    if not levels:
        return
    work = _LowRank(layer, layout, grid_of)
    for structure in _worthwhile(relative(work.forms.errors(_two_arrays(layout)), layer.energy), layout):
        for level in levels:
            factors, entropies = work.rounded(structure, level)
            yield Candidate(replace(level, structure=structure), layer.values(factors.matrix[None]), entropies)


def _two_arrays(layout: Layout) -> tuple[str, ...]:
    return tuple(form for form in layout.forms() if len(layout.shapes(layout.of_rank(form, 1))) == 2)


def _worthwhile(errors: Mapping[Structure, float], layout: Layout) -> list[Structure]:
    """Returns the form and rank of the least error within each share of the weight's entries, the largest first."""
    found: dict[Structure, None] = {}
    for share in FACTOR_SHARES:
        within = [one for one in errors if layout.parameters(one) <= share * layout.parameters(None)]
        best = min(within, key=lambda one: errors[one], default=None)
        if best is None or errors[best] > _WORST_ERROR:
            break
        found[best] = None
    return list(found)


class _LowRank:
    """A weight as two arrays on grids."""

    def __init__(self, layer: LayerLevels, layout: Layout, grid_of: Callable[[np.ndarray, int], Grid]):
        gram = layer.fit.gram[0]
        self.forms, self._grid_of = WindowForms(gram, layer.wanted[0], layout), grid_of
        # The equations of a wide layer take long to solve, and are the same for all ranks and bits.
        self._factors: list[tuple[np.ndarray, OrderedFactor]] = [(gram, layer.factor)]

    def _factor(self, gram: np.ndarray, *, kept: bool) -> OrderedFactor:
        found = next((factor for one, factor in self._factors if one is gram), None)
        if found is None:
            found = ordered_factor(gram[None], DAMPING)
            self._factors += [(gram, found)] if kept else []
        return found

    def rounded(self, structure: Structure, level: Level) -> tuple[Factors, tuple[float, ...]]:
        """Returns both arrays at a level, and the bits of an entry of each."""
        entropies: list[float] = []

        def change(matrix: np.ndarray, gram: np.ndarray) -> np.ndarray:
            if level.bits is None:
                raise ValueError("Arrays of low rank are measured as integers. Received: a level in floating point.")
            grid, price = priced(self._grid_of(matrix, level.bits), level.rate)
            scales = np.broadcast_to(grid.spread(matrix)[0], matrix.shape)[None]
            factor = self._factor(gram, kept=not entropies)
            found = rated_matrix(matrix[None], factor, scales, grid.format, None, price)[0]
            entropies.append(entropy(grid.codes(found)))
            return found.astype("float64")

        return self.forms.changed(structure, change), tuple(entropies)


class LayerLevels:
    """A kernel at different levels, fitted to the outputs that its layer had, on the inputs that it has.

    Args:
        product: The product of the kernel.
        weight: The kernel.
        moments: Moments of its inputs and former outputs.

    Attributes:
        energy: Squares of the former outputs.
    """

    def __init__(self, product: LayerProduct, weight: np.ndarray, moments: LayerMoments):
        self.product, self.weight, self.energy = product, weight.astype("float32"), float(moments.output_squares.sum())
        self.corrects = product.bias(moments.output_sums) is not None
        self.fit = LayerFit(product, moments, centred=self.corrects)
        self._kept = product.matrix(self.weight != 0)
        self._same = product.diagonal or moments.same
        self._matrices = product.matrix(self.weight).astype("float64")

    @functools.cached_property
    def factor(self) -> OrderedFactor:
        """Solves the equations of the fit."""
        return ordered_factor(self.fit.gram, DAMPING)

    @functools.cached_property
    def wanted(self) -> np.ndarray:
        """The matrices that give the layer's former outputs best, shape (groups, inputs, outputs)."""
        return self._matrices if self._same else self.fit.best(self._matrices, DAMPING, self.factor)

    def pruned(self, sparsity: float) -> np.ndarray:
        """Returns the matrices with zeros, the other entries fitted; entries that are zero stay so."""
        first, size = int(np.count_nonzero(self._kept)), self._kept.size
        kept = min(size - pruned_count(sparsity, size), first)
        if self.product.diagonal:
            return np.where(keep_largest_of_array(np.abs(self._matrices), kept), self._matrices, 0.0)
        if kept == size:
            return self.wanted
        if kept == first and self._same:
            return self._matrices
        hessian, _ = damped_hessian(self.fit.gram, DAMPING)
        counts = [kept + round((first - kept) * (1 - number / _ROUNDS) ** 3) for number in range(1, _ROUNDS + 1)]
        curvature = self.factor.restored(curvatures(self.factor.factor)[..., None])[..., 0]

        def select(scores: np.ndarray, mask: np.ndarray, count: int) -> np.ndarray:
            return keep_largest_of_array(np.where(mask & self._kept, scores, -1.0), count)

        return thin(self.wanted, hessian, curvature, select, counts)[0]

    def rounded(self, matrices: np.ndarray, grid: Grid, price: float = 0.0) -> np.ndarray:
        """Returns matrices on the grid of their kernel, at a price of bits in errors of its steps; zeros stay zero."""
        if self.product.diagonal:
            return self.product.matrix(grid.nearest(self.kernel(matrices)))
        kernel = self.kernel(matrices)
        scales = self.product.matrix(np.broadcast_to(grid.spread(kernel)[0], kernel.shape))
        return rated_matrix(matrices, self.factor, scales, grid.format, matrices != 0, price)

    def kernel(self, matrices: np.ndarray) -> np.ndarray:
        """Returns matrices in the shape of the kernel, float32."""
        return self.product.kernel(matrices).astype("float32")

    def shift(self, matrices: np.ndarray) -> np.ndarray | None:
        """Returns what the bias must add, shape (groups, outputs); None without a bias."""
        return self.fit.bias_shift(matrices) if self.corrects else None

    def values(self, matrices: np.ndarray) -> Values:
        """Returns the values of the kernel and of the bias that makes up for the mean error."""
        found: Values = [(self.product.target.variable, self.kernel(matrices))]
        shift = self.shift(matrices)
        if shift is None:
            return found
        bias = self.product.target.layer.bias
        return [*found, (bias, array_of(bias) + self.product.bias(shift))]


def removal_changes(channels: Channels, removed: np.ndarray) -> tuple[Values, dict[int, np.ndarray]]:
    """Returns what sets removed channels to zero, and what of these weights may be fitted.

    Kernels that read the channels keep the entries of these inputs, which are multiplied by zeros.

    Args:
        channels: The channels of a model.
        removed: Some of them.

    Returns:
        (variable, value) of each weight that computes some of the channels, and {id of a variable: entries that stay}
        of those that read some as well.
    """
    kept = channels.kept_numbers(removed)
    targets = {id(one.variable): one for one in find_targets(channels.model, also=("depthwise_kernel", "embedding"))[0]}
    values: Values = []
    masks: dict[int, np.ndarray] = {}
    for variable, value in zeroed(channels, kept):
        target = targets.get(id(variable))
        if target is None:
            values.append((variable, value))
            continue
        axes = channels.links.weights[id(variable)]
        outputs = {axis: one for axis, one in axes.channels.items() if axis not in target.in_axes}
        if all(kept[one].all() for one in outputs.values()):
            continue
        mask = masked(np.ones(tuple(target.shape), bool), replace(axes, channels=outputs), kept)
        if len(outputs) < len(axes.channels):
            masks[id(variable)] = mask
        values.append((variable, np.where(mask, array_of(variable), 0)))
    return values, masks


def entropy(codes: np.ndarray) -> float:
    """Returns the bits of a code by the frequencies of all codes."""
    _, counts = np.unique(codes, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def _float_bits(values: np.ndarray) -> float:
    """Returns the bits of an entry in floating point: 32 for those that are not zero, and where these are."""
    share = float(np.count_nonzero(values) / values.size)
    return 32 * share + entropy(values != 0)


class LevelSolver:
    """Puts each weight on its level while a model is repaired layer by layer; see `core.layerwise.layer_fit.Solver`.

    Args:
        targets: The weights.
        levels: Their levels.
        grid_of: Returns the grid of a target for a kernel and so many bits.
    """

    repairs = True

    def __init__(
        self,
        targets: Sequence[Target],
        levels: Sequence[Level],
        grid_of: Callable[[Target, np.ndarray, int], Grid],
    ):
        self._targets, self._levels, self._grid_of = targets, levels, grid_of

    def solve(self, index: int, product: LayerProduct, weight: np.ndarray, moments: LayerMoments) -> Solution:
        """Returns the new value of target `index`."""
        level, layer = self._levels[index], LayerLevels(product, weight, moments)
        found = layer.pruned(level.sparsity)
        if level.bits is not None:
            grid, price = priced(self._grid_of(self._targets[index], layer.kernel(found), level.bits), level.rate)
            found = layer.rounded(found, grid, price)
        kernel = layer.kernel(found)
        return Solution(kernel, kernel != 0, layer.shift(found), layer.fit.error(found))
