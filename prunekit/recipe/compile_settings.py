"""Makes the optimizer, the loss and the accuracy metric that a recipe's compile settings name."""

from typing import Any

import keras

from prunekit.recipe.loader import RecipeError
from prunekit.recipe.sources import LOGIT_LOSSES, OPTIMIZERS, Compile


def optimizer_from(settings: Compile) -> keras.optimizers.Optimizer:
    """Returns the Keras optimizer that the compile settings describe.

    Raises:
        RecipeError: The installed Keras has no such optimizer, or the optimizer rejects the arguments.
    """
    kind = getattr(keras.optimizers, OPTIMIZERS[settings.optimizer.name], None)
    if kind is None:
        raise RecipeError(f"compile.optimizer: Keras {keras.__version__} has no {OPTIMIZERS[settings.optimizer.name]}.")
    arguments = dict(settings.optimizer.arguments)
    if settings.optimizer.learning_rate is not None:
        arguments["learning_rate"] = settings.optimizer.learning_rate
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"compile.optimizer: {kind.__name__} refuses its arguments: {reason_of(error)}.") from error


def loss_from(settings: Compile) -> Any:
    """Returns the Keras loss that the compile settings name."""
    if settings.from_logits:
        return getattr(keras.losses, LOGIT_LOSSES[settings.loss])(from_logits=True)
    return keras.losses.get(settings.loss)


def accuracy_metric(settings: Compile | None) -> str | None:
    """Returns the metric used as "accuracy" in expectations and the report; None without an accuracy metric."""
    named = [name for name in settings.metrics if name.endswith("accuracy") and "top_k" not in name] if settings else []
    return "accuracy" if "accuracy" in named else next(iter(named), None)


def reason_of(error: BaseException) -> str:
    """Returns the line of an error's text that states the reason."""
    # Keras writes "Exception encountered when calling X.", a blank line and a bold escape before the reason. TensorFlow
    # writes the node and the Python frames that created the node.
    before = ("Exception encountered", "Graph execution error", "Detected at node", "File ")
    lines = [line.replace("\x1b[1m", "").replace("\x1b[0m", "").strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(before)]
    return (lines or [type(error).__name__])[0].rstrip(".")
