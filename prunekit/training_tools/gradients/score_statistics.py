"""Statistics of criteria: gradients of the compiled loss, products of its Hessian, and the flow of SynFlow."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.layer_rows import STATE
from prunekit.anatomy.layers.model_weights import places, weights_in
from prunekit.core.runtime import backend
from prunekit.core.runtime.differentiation import gradient, hessian_product
from prunekit.core.runtime.losses import check_classes
from prunekit.core.runtime.model_function import ModelFunction
from prunekit.core.runtime.patching import computing_in
from prunekit.core.statistics.layer_calls import input_of_ones
from prunekit.core.statistics.layer_observer import LINKS, activation_of, as_tensors, is_float, observe
from prunekit.core.statistics.statistics import Collector, DataCollector


def check_labelled(model: Any, labels: Any, statistic: str) -> None:
    """Raises unless the model has a loss and the data have labels.

    Raises:
        ValueError: The model is not compiled with a loss, or the labels are None.
    """
    if not getattr(model, "compiled", False) or (
        model.loss is None and type(model).compute_loss is keras.Model.compute_loss
    ):
        raise ValueError(
            f"The statistic {statistic!r} is a derivative of the model's loss. Received: the model {model.name!r}, "
            "which is not compiled with a loss. Call model.compile(optimizer, loss) first."
        )
    if labels is None:
        raise ValueError(
            f"The statistic {statistic!r} is a derivative of the model's loss, which needs labels. Received: data "
            "without labels. Pass `data` as a pair (inputs, labels), or batches of such pairs."
        )
    check_classes(model, labels)


def in_full_precision(model: Any) -> contextlib.AbstractContextManager:
    """Returns a context manager in which layers that compute in 16 bits compute in float32.

    In float16, small gradients would become zero, and there is no loss scaling here.
    """
    layers = [place.layer for place in places(model)]
    narrow = any(layer.compute_dtype in ("float16", "bfloat16") for layer in layers)
    return computing_in("float32", layers) if narrow else contextlib.nullcontext()


class _LossDerivative(DataCollector):
    """Sums a derivative of each batch's loss; the mean over all examples is the statistic.

    Attributes:
        name: Name of the statistic, for messages.
        training: Whether the model runs as in a training step, with batch statistics in batch normalisation.
    """

    name: str
    training = False

    def reset(self) -> None:
        """Forgets all batches."""
        self._sums: list[Any] = [0.0] * len(self.targets)
        self._examples = 0

    def observe(self, inputs: Any, labels: Any) -> None:
        """Adds a batch, weighted by its number of examples."""
        check_labelled(self.model, labels, self.name)
        inputs, labels = as_tensors(inputs), as_tensors(labels)
        count = keras.tree.flatten(inputs)[0].shape[0]
        found = self._compiled(inputs, labels, self.known())
        self._sums = [total + count * one for total, one in zip(self._sums, found, strict=True)]
        self._examples += count

    @functools.cached_property
    def _compiled(self) -> Callable[..., list[Any]]:
        def of(inputs: Any, labels: Any, known: list[Any]) -> list[Any]:
            with in_full_precision(self.model):
                return self.of(inputs, labels, known)

        return ModelFunction(self.model, of)

    def known(self) -> list[Any]:
        """Returns tensors from an earlier pass that `of` reads."""
        return []

    def of(self, inputs: Any, labels: Any, known: list[Any]) -> list[Any]:
        """Returns the derivative for one batch: one tensor per target."""
        raise NotImplementedError

    def values(self) -> list[Any]:
        """Returns the mean over all examples: one tensor of the weight's shape per target."""
        return [total / self._examples for total in self._sums]

    def _now(self) -> list[Any]:
        """Returns the values of the targets."""
        return [backend.value_now(target.variable) for target in self.targets]

    def _loss(self, inputs: Any, labels: Any) -> Any:
        """Returns the function: values of the targets -> loss of the batch, which leaves the model unchanged."""

        def loss(values: list[Any]) -> Any:
            # On JAX, the scope around this one has the variables' values, and Keras reads the innermost scope only.
            pairs = [(variable, backend.value_now(variable)) for variable in self.model.variables]
            pairs += [(target.variable, value) for target, value in zip(self.targets, values, strict=True)]
            with keras.StatelessScope(pairs, collect_losses=True):
                outputs = self.model(inputs, training=self.training)
                return self.model.compute_loss(x=inputs, y=labels, y_pred=outputs, training=self.training)

        return loss


class Gradient(_LossDerivative):
    """Collects the gradient of the mean loss over the data, as in a training step."""

    name = "gradient"
    training = True

    def of(self, inputs: Any, labels: Any, known: list[Any]) -> list[Any]:
        """Returns the gradient of the batch's loss."""
        return gradient(self._loss(inputs, labels), self._now())


class SquareBatchGradient(_LossDerivative):
    """Collects the mean over batches of the squared gradient of the batch's loss, in inference mode."""

    name = "square_batch_gradient"

    def of(self, inputs: Any, labels: Any, known: list[Any]) -> list[Any]:
        """Returns the squared gradient of the batch's loss."""
        return [ops.square(one) for one in gradient(self._loss(inputs, labels), self._now())]


class GradientFlow(_LossDerivative):
    """Collects H g: the Hessian of the mean loss over the data, times its gradient, with respect to the targets.

    The first pass over the data adds up the gradient, the second its products with each batch's Hessian.
    """

    name = "gradient_flow"
    training = True
    passes = 2

    def begin_pass(self, number: int) -> None:
        """Keeps the gradient when the second pass begins."""
        self._gradient = self.values() if number else []
        self.reset()

    def known(self) -> list[Any]:
        """Returns the gradient in the second pass, nothing in the first."""
        return self._gradient

    def of(self, inputs: Any, labels: Any, known: list[Any]) -> list[Any]:
        """Returns the gradient of the batch's loss in the first pass, in the second the product of its Hessian."""
        loss = self._loss(inputs, labels)
        if not known:
            return gradient(loss, self._now())
        with _exact_second_derivatives():
            return hessian_product(loss, self._now(), known)


def _exact_second_derivatives() -> contextlib.AbstractContextManager:
    if keras.backend.backend() == "torch":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # Flash attention has no second derivative.
        return sdpa_kernel(SDPBackend.MATH)
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    from prunekit.training_tools.gradients.layer_capture import exact_moments

    return exact_moments()


class SynapticFlow(Collector):
    """Reads the gradient of R, the sum of the model's outputs on ones with all weights replaced by their magnitudes.

    A pass in inference mode reads the magnitudes in place of the weights, which are not written; state such as the
    moving averages of batch normalisation is read as it is. A softmax or sigmoid at the end of the model is left out:
    the sum of a softmax is constant. The pass runs in float64, because R exceeds the range of float32 in networks of
    some tens of layers; on JAX it runs in float32 unless JAX has its 64-bit types enabled. The gradients are divided by
    the largest score |w| * dR/d|w|.
    """

    def check(self) -> None:
        """Raises for a model with inputs that are not of a floating-point type."""
        if not all(map(is_float, keras.tree.flatten(input_of_ones(self.model)))):
            raise ValueError(
                "SynFlow computes the flow of an input of ones, so all inputs must be of a floating-point type. "
                f"Received: the model {self.model.name!r} with inputs of another type. Choose another criterion."
            )

    def values(self) -> list[Any]:
        """Returns the gradient of R for each target, scaled so that the largest score is 1; float32.

        Raises:
            ValueError: R or a score is not finite.
        """
        magnitudes, found = self._derivatives()
        largest = max(float(ops.max(size * ops.abs(one))) for size, one in zip(magnitudes, found, strict=True))
        if not np.isfinite(largest):
            raise ValueError(
                f"SynFlow's scores must be finite. Received: {largest} in the model {self.model.name!r}. Its weights "
                "or its depth exceed the range of the type: on JAX, enable 64-bit types with JAX_ENABLE_X64=1, or "
                "choose another criterion."
            )
        return [ops.cast(one / (largest or 1.0), "float32") for one in found]

    @functools.cached_property
    def _derivatives(self) -> Callable[[], tuple[list[Any], list[Any]]]:
        """Function that returns the magnitudes of the targets, and the gradient of R in them."""
        return ModelFunction(self.model, self._magnitudes_and_gradient)

    def _magnitudes_and_gradient(self) -> tuple[list[Any], list[Any]]:
        args, kwargs = input_of_ones(self.model)
        known = [
            one for one in weights_in(self.model) if "float" in keras.backend.standardize_dtype(one.variable.dtype)
        ]
        weights = [one.variable for one in known if one.spec.refused != STATE]
        dtype = _widest_type()
        with computing_in(dtype, (place.layer for place in places(self.model))):
            now = {id(one): ops.cast(ops.stop_gradient(backend.value_now(one.variable)), dtype) for one in known}
            args, kwargs = keras.tree.map_structure(lambda value: ops.cast(value, dtype), (args, kwargs))
            magnitudes = [ops.abs(now[id(one)]) for one in known if one.spec.refused != STATE]
            state = [(one.variable, now[id(one)]) for one in known if one.spec.refused == STATE]
            found = gradient(
                lambda values: self._flow(args, kwargs, [*zip(weights, values, strict=True), *state]), magnitudes
            )
        of = {id(variable): at for at, variable in enumerate(weights)}
        at_targets = [of[id(target.variable)] for target in self.targets]
        return [magnitudes[at] for at in at_targets], [found[at] for at in at_targets]

    def _flow(self, args: tuple, kwargs: dict, values: Sequence[tuple[Any, Any]]) -> Any:
        """Returns R, the sum of the outputs, for pairs (weight, value that is read in its place)."""
        before_links: dict[int, tuple[Any, Any]] = {}

        def see(layer: Any, before: Any, after: Any) -> None:
            if activation_of(layer) in LINKS:
                before_links[id(after)] = after, before

        def run(_: Any, training: bool) -> Any:
            return self.model(*args, **kwargs, training=training)

        outputs = observe(run, None, see, training=False, values=values)
        leaves = [leaf for leaf in keras.tree.flatten(outputs) if is_float(leaf)]
        return sum(ops.sum(before_links.get(id(leaf), (leaf, leaf))[1]) for leaf in leaves)


def _widest_type() -> str:
    """Returns "float64", or "float32" where JAX has its 64-bit types disabled."""
    if keras.backend.backend() != "jax":
        return "float64"
    import jax

    return "float64" if jax.config.jax_enable_x64 else "float32"
