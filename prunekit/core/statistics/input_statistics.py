"""Statistics of the inputs that weights multiply: their norms and their Hessians, from calibration data."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.core.data.batch_parts import in_parts
from prunekit.core.outputs.graph_steps import run_released
from prunekit.core.statistics.layer_inputs import (
    InputProducts,
    observing_inputs,
    row_sums,
    rows_in_parts,
    sampled_rows,
    weighted,
)
from prunekit.core.statistics.layer_products import LayerProduct, product_of
from prunekit.core.statistics.statistics import DataCollector
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.reconstruction import curvatures, inverse_factor

# Bytes of the outputs of layers that are in memory at once.
_AT_ONCE = 1 << 28


class _OfInputs(DataCollector):
    """Runs the model in inference mode and observes the inputs of the targets' layers."""

    def __init__(self, model: Any, targets: Sequence[Target]):
        super().__init__(model, targets)
        self.products = [product_of(target) for target in self.targets]
        self._of_layer: dict[int, list[int]] = {}
        for index, target in enumerate(self.targets):
            self._of_layer.setdefault(id(target.layer), []).append(index)
        self.examples = 0
        self.calls = [0] * len(self.products)

    def reset(self) -> None:
        """Forgets all batches."""
        self.examples, self.calls = 0, [0] * len(self.products)
        self.forget()

    def forget(self) -> None:
        """Forgets the sums of all batches."""
        raise NotImplementedError

    def add(self, index: int, product: LayerProduct, args: tuple) -> None:
        """Adds the inputs of one call to the sums of one target."""
        raise NotImplementedError

    def observe(self, inputs: Any, labels: Any) -> None:
        """Observes the inputs of the targets' layers on one batch."""

        def see(layer: Any, args: tuple) -> None:
            for index in self._of_layer[id(layer)]:
                self.calls[index] += 1
                self.add(index, self.products[index], args)

        with observing_inputs([target.layer for target in self.targets], see):
            done = 0
            for part in in_parts(self.model, [inputs], _AT_ONCE, "live"):
                run_released(self.model, part)
                done += len(keras.tree.flatten(part)[0])
                self.told(done)
        self.examples += len(keras.tree.flatten(inputs)[0])

    def check_observed(self) -> None:
        """Raises unless the layer of every target was called.

        Raises:
            ValueError: The model does not call a layer, or calls it where its inputs cannot be observed.
        """
        unseen = [target.name for target, calls in zip(self.targets, self.calls, strict=True) if not calls]
        if unseen:
            raise ValueError(
                f"The inputs of {', '.join(unseen[:5])} were not observed. Received: calibration data on which the "
                "model does not call the layer, or calls it inside a loop of the backend. Leave the weight out with "
                "`exclude`, or choose a criterion that reads no inputs."
            )


class InputNorms(_OfInputs):
    """The L2 norm, over all rows of the calibration data, of the input that each weight multiplies.

    A value has the shape of the weight. Memory: one number per input of each layer, and one weight at a time.
    """

    def forget(self) -> None:
        """Forgets the sums of all batches."""
        self.squares = [np.zeros((product.groups, product.inputs)) for product in self.products]

    def add(self, index: int, product: LayerProduct, args: tuple) -> None:
        """Adds the squares of the inputs of one call."""
        for rows in rows_in_parts(product, args):
            if product.diagonal:
                self.squares[index][0] += np.bincount(array_of(rows), minlength=product.inputs)
            else:
                self.squares[index] += row_sums(rows * rows)

    def values(self) -> list[Any]:
        """Returns the norms, one tensor of the shape of each target."""
        self.check_observed()
        return [_spread(product, np.sqrt(total)) for product, total in zip(self.products, self.squares, strict=True)]


class Hessians(_OfInputs):
    """X^T X of the rows X of each target's layer: the Hessian of half the squared error of the layer's outputs.

    A value is {"hessian": array of shape (groups, inputs, inputs), float64, divided by the number of examples;
    "curvature": 1 / [H^-1]_jj of the input j that each weight multiplies, a tensor of the shape of the weight}, where
    H is the Hessian with 1 % of its mean diagonal added to the diagonal. The Hessian of an embedding is diagonal, and
    of shape (inputs,). Memory: 12 * groups * inputs ** 2 bytes for each target.
    """

    def forget(self) -> None:
        """Forgets the sums of all batches."""
        self.sums = [InputProducts(product) for product in self.products]

    def add(self, index: int, product: LayerProduct, args: tuple) -> None:
        """Adds the products of the inputs of one call."""
        self.sums[index].observe(args)

    def values(self) -> list[Any]:
        """Returns Hessian and curvature of each target."""
        self.check_observed()
        found = []
        for product, sums in zip(self.products, self.sums, strict=True):
            hessian = sums.gram / self.examples
            curvature = hessian[None] if product.diagonal else curvatures(inverse_factor(hessian))
            found.append({"hessian": hessian, "curvature": _spread(product, curvature)})
        return found


class InputMoments(_OfInputs):
    """Sums of products and mean magnitudes of the inputs of each target's layer.

    A value is {"gram": X^T X of the rows X, array of shape (groups, inputs, inputs); "mean_abs": mean of |X| over the
    rows, array of shape (groups, inputs); "rows": number of rows of each group}, the arrays in float64. The rows of an
    embedding are one-hot: its "gram" is the number of lookups of each row of the table, shape (inputs,). Memory:
    12 * groups * inputs ** 2 bytes for each target, 8 * inputs for an embedding.
    """

    def forget(self) -> None:
        """Forgets the sums of all batches."""
        self.sums = [InputProducts(product) for product in self.products]
        self.magnitudes = [np.zeros((product.groups, product.inputs)) for product in self.products]

    def add(self, index: int, product: LayerProduct, args: tuple) -> None:
        """Adds the products and magnitudes of the inputs of one call."""
        for rows, weight in sampled_rows(product, args):
            self.sums[index].add(rows, weight)
            # Of one-hot rows the sums are those of the magnitudes.
            self.magnitudes[index] += 0.0 if product.diagonal else weighted(row_sums(abs(rows)), weight)

    def values(self) -> list[Any]:
        """Returns products and mean magnitudes of each target."""
        self.check_observed()
        found = []
        for sums, magnitudes in zip(self.sums, self.magnitudes, strict=True):
            total = sums.sums if sums.product.diagonal else magnitudes
            found.append({"gram": sums.gram, "mean_abs": total / max(sums.rows, 1), "rows": sums.rows})
        return found


def _spread(product: LayerProduct, per_input: np.ndarray) -> Any:
    """Returns one number per input as a tensor of the shape of the kernel."""
    matrix = np.broadcast_to(per_input[:, :, None].astype("float32"), (product.groups, product.inputs, product.outputs))
    return ops.convert_to_tensor(product.kernel(matrix))
