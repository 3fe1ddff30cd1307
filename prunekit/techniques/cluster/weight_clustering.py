"""Puts the weights of a layer on centroids: the nearest ones, or those that keep what the layer computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prunekit.anatomy.layers.targets import Target
from prunekit.core.layerwise.layer_fit import LayerFit, Solution
from prunekit.core.statistics.layer_inputs import LayerMoments
from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.reconstruction import DAMPING, damped_hessian, reconstruct
from prunekit.techniques.cluster.codebooks import Channels, Codebooks, without_zeros
from prunekit.techniques.quantize.rounding.gptq import OrderedFactor, ordered_factor

# Rows that change one by one; the rows after them change once, by a matrix product.
_RUN = 128
# Most times that centroids are refitted to the outputs and the weights assigned anew.
_ROUNDS = 4


class WeightClusterer:
    """Clusters one weight after another, on calibration data; see `core.layerwise.layer_fit.Solver`.

    Args:
        targets: The weights.
        channels: Which entries of each share a codebook.
        clusters: Largest number of values in each codebook of each.
        method: "kmeans": the nearest centroids, each squared error counted by the energy of its input. "gptq": one
            input after another, the others make up for the error, and centroids are fitted to the outputs.
        corrects_biases: True if biases make up for the mean error of outputs.
        start: As for `kmeans`.

    Attributes:
        codebooks: id of a variable -> its codebooks.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        channels: Sequence[Channels],
        clusters: Sequence[int],
        *,
        method: str,
        corrects_biases: bool,
        start: str = "auto",
    ):
        self._targets, self._channels, self._clusters = targets, channels, clusters
        self._method, self._corrects_biases, self._start = method, corrects_biases, start
        self.codebooks: dict[int, Codebooks] = {}

    @property
    def repairs(self) -> bool:
        """True if biases are corrected."""
        return self._corrects_biases

    def solve(self, index: int, product: LayerProduct, weight: np.ndarray, moments: LayerMoments) -> Solution:
        """Returns the new value of target `index`; entries that are zero stay zero, and no others become zero."""
        whole = np.ones(weight.shape, bool)
        if moments.same:
            plain = Codebooks.fitted(weight, self._channels[index], self._clusters[index], start=self._start)
            if plain.holds(weight):
                self._keep(index, plain)
                return Solution(weight, whole, None, 0.0)
        corrects = self.repairs and product.bias(moments.output_sums) is not None
        fit = LayerFit(product, moments, centred=corrects)
        if self._method == "gptq" and not product.diagonal:
            found = self._fitted(index, product, weight, fit)
        else:
            energy = fit.gram if product.diagonal else np.diagonal(fit.gram, axis1=-2, axis2=-1)
            energies = product.kernel(np.broadcast_to(np.reshape(energy, (*energy.shape, 1)), _shape(product, weight)))
            books = Codebooks.fitted(weight, self._channels[index], self._clusters[index], energies, start=self._start)
            self._keep(index, books)
            found = books.nearest(weight)
        matrices = product.matrix(found)
        matrices = matrices if product.diagonal else matrices.astype("float64")
        shift = fit.bias_shift(matrices) if corrects else None
        return Solution(found, whole, shift, fit.error(matrices))

    def _keep(self, index: int, books: Codebooks) -> None:
        self.codebooks[id(self._targets[index].variable)] = books

    def _fitted(self, index: int, product: LayerProduct, weight: np.ndarray, fit: LayerFit) -> np.ndarray:
        """Returns the kernel whose outputs are nearest among those that the rounds find."""
        channels = self._channels[index]
        matrices = product.matrix(weight).astype("float64")
        factor = ordered_factor(fit.gram, DAMPING)
        # The weights that give the layer's former outputs best on its present inputs.
        wanted = fit.best(matrices, DAMPING, factor)
        kept = product.matrix(weight != 0)
        # A weight that is fitted to 0 is no zero.
        wanted = np.where(kept & (wanted == 0), np.finfo("float32").tiny, np.where(kept, wanted, 0.0))
        numbers = product.matrix(np.array(channels.numbers))
        energy = np.diagonal(fit.gram, axis1=-2, axis2=-1)[..., None]
        books = Codebooks.fitted(
            product.kernel(wanted),
            channels,
            self._clusters[index],
            product.kernel(np.broadcast_to(energy, wanted.shape)),
            self._start,
        )
        damped, _ = damped_hessian(fit.gram, DAMPING)
        least, best = np.inf, (books, matrices)
        for _ in range(_ROUNDS):
            places = _places(wanted, factor, books, numbers, kept)
            refitted = _refitted(wanted, damped, books, numbers, places, kept)
            found = np.where(kept, refitted.values(numbers, places), np.float32(0))
            error = fit.error(found.astype("float64"))
            if error >= least * (1 - 1e-3):
                break
            least, best = error, (refitted, found)
            books = refitted.sorted()
        self._keep(index, best[0].sorted())
        return product.kernel(best[1])


def _shape(product: LayerProduct, weight: np.ndarray) -> tuple[int, ...]:
    return tuple(product.matrix(weight).shape)


def _places(
    wanted: np.ndarray, factor: OrderedFactor, books: Codebooks, numbers: np.ndarray, kept: np.ndarray
) -> np.ndarray:
    """Returns the number of each weight's centroid: the nearest one when the inputs before it are fixed.

    Args:
        wanted: Matrices, shape (groups, inputs, outputs).
        factor: Factor of the inverse Hessian, with the order of the inputs.
        books: The centroids, ascending.
        numbers: Numbers of codebooks, the shape of the matrices.
        kept: False = the weight is 0.

    Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1, with centroids in the place of a grid.
    """
    inputs = wanted.shape[-2]
    places, of_rows, mask = np.zeros(wanted.shape, "intp"), factor.ordered(numbers), factor.ordered(kept)

    def nearest(row: int, values: np.ndarray) -> np.ndarray:
        codebook = of_rows[..., row, :]
        places[..., row, :] = books.nearest_in(codebook, values)
        return books.values(codebook, places[..., row, :])

    runs = [slice(start, min(start + _RUN, inputs)) for start in range(0, inputs, _RUN)]
    reconstruct(factor.ordered(wanted), factor.factor, runs, lambda rows, scores: mask[..., rows, :], nearest)
    return factor.restored(places)


def _refitted(
    wanted: np.ndarray,
    hessian: np.ndarray,
    books: Codebooks,
    numbers: np.ndarray,
    places: np.ndarray,
    kept: np.ndarray,
) -> Codebooks:
    """Returns the centroids that give the wanted outputs best, for given places: least squares in their number.

    The outputs of a codebook with centroids c are S c for S = sum over places, so that c solves (S^T H S) c = S^T H w.
    Centroids are not sorted.

    Args:
        wanted: Matrices, shape (groups, inputs, outputs).
        hessian: Damped Hessians, shape (groups, inputs, inputs).
        books: The centroids before.
        numbers: Numbers of codebooks, the shape of the matrices.
        places: Numbers of centroids, the shape of the matrices.
        kept: False = the weight is 0, and belongs to no centroid.
    """
    count, size = books.table.shape
    cells = np.where(kept, numbers * size + places, count * size).ravel()
    curved = (hessian @ wanted).ravel()
    right = np.bincount(cells, curved, count * size + 1)[:-1].reshape(count, size)
    left = np.zeros((count, size, size))
    for column in range(size):
        members = ((places == column) & kept).astype("float64")
        sums = np.bincount(cells, (hessian @ members).ravel(), count * size + 1)[:-1]
        left[:, :, column] = sums.reshape(count, size)
    used = np.bincount(cells, minlength=count * size + 1)[:-1].reshape(count, size) > 0
    # A centroid without members keeps its value.
    left[~used] = 0.0
    left += np.eye(size) * np.where(used, 0.0, 1.0)[..., None]
    before = np.where(np.isfinite(books.table), books.table, 0.0).astype("float64")
    right = np.where(used, right, before)
    diagonal = np.einsum("kii->ki", left)
    diagonal += 1e-9 * diagonal.mean(axis=-1, keepdims=True) * used
    solved = np.linalg.solve(left, right[..., None])[..., 0].astype("float32")
    return replace(books, table=np.where(np.isfinite(books.table), without_zeros(solved), np.float32(np.inf)))
