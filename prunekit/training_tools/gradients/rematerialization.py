"""Gradients with less memory: the named layers keep only their inputs, and run again in the backward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import record

from prunekit.anatomy.graph.watching import is_watched
from prunekit.anatomy.layers.layer_names import as_names, find_site
from prunekit.anatomy.layers.layers import is_repeater
from prunekit.anatomy.layers.model_weights import check_built, places
from prunekit.core.runtime import backend, patching
from prunekit.core.training.train_function import fresh_functions
from prunekit.training_tools.gradients.layer_capture import is_differentiable
from prunekit.training_tools.gradients.repeated_run import Run, differentiable, replaced


@contextmanager
def recomputing(model: Any, layers: Sequence[str] | str) -> Iterator[None]:
    """Makes the named layers keep only their inputs in the forward pass and run again in the backward pass.

    Training results do not change: the second run draws the same random numbers and does not move averages again.
    Eagerly the results agree bit for bit; in a compiled step TensorFlow may fuse operations of the first run and round
    differently. This saves the memory of all tensors between a layer's inputs and outputs, at the cost of one more
    forward pass of the layer. It works in `model.fit`, `train_on_batch` and `TapeLoop`, also if the model was trained
    before. A user's own `tf.function` keeps its trace, so its first call must be inside the scope.

    While layer calls are watched (per-example gradients, derivatives of a layer's activations) the layers run once.

    Args:
        model: A built Keras model; it is restored at the end of the scope.
        layers: Names or paths of layers, such as "block" or "block/conv_1"; most useful for nested models and layers
            made of layers, since a single operation has few tensors between its inputs and outputs.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.
        TypeError: `model` is not a Keras 3 model; a name is not a string.
        ValueError: The model is not built; no layer, or several layers, have a name; `layers` is empty; a layer is
            quantized, or is called inside the loop of a recurrent layer.

    Source: Chen et al. 2016, arXiv:1604.06174, section 3.
    """
    backend.require_tensorflow("pk.gradients.recomputing")
    check_built(model)
    blocks = [_block(model, name) for name in as_names(layers, "layers")]
    if not blocks:
        raise ValueError(f"recomputing() needs at least one layer name. Received: layers={layers!r}.")
    with ExitStack() as stack:
        for block in {id(block): block for block in blocks}.values():
            stack.enter_context(patching.wrapped(block, "call", partial(_rerun, block)))
        stack.enter_context(fresh_functions(model))
        yield


def _block(model: Any, name: Any) -> Any:
    if not isinstance(name, str):
        raise TypeError(f"`layers` takes names of layers, whose calls are all recomputed. Received: {name!r}.")
    layer = find_site(model, name, "layers").layer
    if getattr(layer, "quantization_mode", None) is not None:
        raise ValueError(
            f"A quantized layer is not trained, so there is no pass to recompute. Received: layers={name!r}, quantized "
            f"to {layer.quantization_mode}. Leave it out."
        )
    for around in {id(place.layer): place for place in places(model) if is_repeater(place.layer)}.values():
        if around.layer is not layer and any(below.layer is layer for below in places(around.layer)):
            raise ValueError(
                "A layer that is called inside a loop cannot be recomputed by itself. Received: "
                f"layers={name!r}. Name the layer around it, {around.path!r}."
            )
    return layer


# ---------------------------------------------------------------- in place of a layer's call


def _rerun(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `call` with a custom gradient, which runs `call` again."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if is_watched():
            return call(*args, **kwargs)
        leaves = keras.tree.flatten((args, kwargs))

        def piece(*inputs: Any) -> Any:
            filled, named = keras.tree.pack_sequence_as((args, kwargs), list(inputs))
            return call(*filled, **named)

        run = Run(piece)
        outputs, losses = run.first(leaves)
        outputs, losses = replaced(outputs, _spliced(run, leaves, differentiable(outputs, losses)))
        for loss in losses:
            # Functional models refuse add_loss, although the losses that their layers add count.
            keras.layers.Layer.add_loss(layer, loss)
        return outputs

    return called


def _spliced(run: Run, inputs: list[Any], targets: list[Any]) -> list[Any]:
    """Returns `targets`, the run's results, as differentiable functions of the run's inputs and variables."""
    sources = list({id(each): each for each in [*inputs, *run.values] if is_differentiable(each)}.values())
    if tf.executing_eagerly():
        # From inside a graph, a tape outside the graph cannot be detected.
        sources = [each for each in sources if record.should_record_backprop([each])]
    if not sources or not targets:
        return targets

    @tf.custom_gradient
    def splice(*_: Any) -> Any:
        # Without `stop_gradient`, TensorFlow would search the graph behind these tensors for variables.
        return [tf.stop_gradient(target) for target in targets], lambda *upstream: run.again(inputs, sources, upstream)

    return splice(*sources)
