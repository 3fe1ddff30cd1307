"""Training steps that are pure functions, as on JAX: state goes in, new state comes out.

What such a step reads and is not part of its state, its compiler takes for a constant. Masks therefore travel with the
optimizer's variables for as long as they are to be held: through `fit`, `train_on_batch` and every loop that passes
`optimizer.variables` to `optimizer.stateless_apply`. Elsewhere these functions do nothing.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from prunekit.core import backend, patching
from prunekit.core.optimizers import parts_of


def steps_are_pure() -> bool:
    """Whether this backend's compiled steps take their variables as arguments."""
    return keras.backend.backend() == "jax"


def sync_model_state(model) -> None:
    """Writes the compiled step's state back to the model's variables, where `fit` on JAX holds it apart from them."""
    synchronise = getattr(model, "jax_state_sync", None)
    if synchronise is not None:
        synchronise()


def at_hand(variables: Sequence[Any]) -> bool:
    """Whether the variables hold their values: on JAX, `fit` takes those away while its steps run."""
    return all(getattr(variable, "_value", variable) is not None for variable in variables)


def unshare_ema_arrays(optimizers: Sequence[Any]) -> None:
    """Gives the weight averages of optimizers with `use_ema` arrays of their own.

    At the end of `fit` Keras assigns each average to its weight, so that both share one array. Compiled steps, also of
    `evaluate`, are given the memory of their arguments: the average would be lost, or JAX would refuse to donate one
    array twice.
    """
    if steps_are_pure():
        for part in (part for one in optimizers for part in parts_of(one)):
            for average in getattr(part, "_model_variables_moving_average", ()):
                if not average.value.is_deleted():
                    average.assign(keras.ops.copy(average.value))


def progress(optimizers: Sequence[Any]) -> tuple[float, ...]:
    """Numbers of which every update of one of the optimizers changes some."""
    scales = [one for one in optimizers if isinstance(one, keras.optimizers.LossScaleOptimizer) and one.built]
    # `iterations` stands still while gradients are accumulated. An update that a LossScaleOptimizer skips is none to
    # the optimizer inside.
    counters = [part._iterations for one in optimizers for part in parts_of(one)]
    counters += [v for one in scales for v in one._variables]
    return tuple(backend.number(counter) for counter in counters)


@contextlib.contextmanager
def masks_in_optimizer_state(optimizer, rows: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Inside, the masks are among the optimizer's variables, but not among those that it saves or loads.

    Args:
        optimizer: The optimizer that a loop updates with.
        rows: (weight that the optimizer updates, its mask variable).
    """
    if not steps_are_pure():
        yield
        return
    joined = [(part, _guests(part, rows)) for part in _built_parts(optimizer)]
    for part, guests in joined:
        part._variables.extend(guests)
    with contextlib.ExitStack() as stack:
        for name in ("save_own_variables", "load_own_variables"):
            stack.enter_context(patching.wrapped(optimizer, name, functools.partial(_without, joined)))
        try:
            yield
        finally:
            for part, guests in joined:
                _remove(part, guests)


def _built_parts(optimizer) -> list[Any]:
    parts = parts_of(optimizer)
    if len(parts) > 1 and not optimizer.built:
        raise RuntimeError(
            f"On JAX each mask travels with the optimizer that updates its weight. Received: {optimizer.name}, which "
            "has not shared out the weights yet. Call optimizer.build(model.trainable_variables) first."
        )
    return parts


def _guests(part, rows) -> list[Any]:
    known = {id(variable) for variable in part._trainable_variables}
    return [guest for variable, guest in rows if id(variable) in known or not part.built]


def _remove(part, guests) -> None:
    leaving = {id(guest) for guest in guests}
    part._variables[:] = [variable for variable in part._variables if id(variable) not in leaving]


def _without(joined, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of an optimizer, run while the guests are out."""

    def run(*args, **kwargs):
        former = [(part, list(part._variables)) for part, _ in joined]
        for part, guests in joined:
            _remove(part, guests)
        try:
            return method(*args, **kwargs)
        finally:
            for part, variables in former:
                part._variables[:] = variables

    return run


@contextlib.contextmanager
def before_scale_checks(optimizers: Sequence[Any], mask: Callable[..., Any]) -> Iterator[None]:
    """Inside, a LossScaleOptimizer is given `mask(gradients, variables)`: what is masked skips no step.

    Its `stateless_apply` looks at the gradients before any `apply` is called.
    """
    scaled = [one for one in optimizers if isinstance(one, keras.optimizers.LossScaleOptimizer) and steps_are_pure()]
    with contextlib.ExitStack() as stack:
        for optimizer in scaled:
            wrap = functools.partial(_masked_first, optimizer, mask)
            stack.enter_context(patching.wrapped(optimizer, "stateless_apply", wrap))
        yield


def _masked_first(optimizer, mask, method):
    def stateless_apply(optimizer_variables, grads, trainable_variables):
        mapping = list(zip(optimizer.variables, optimizer_variables, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            grads = mask(grads, optimizer._trainable_variables)
        return method(optimizer_variables, grads, trainable_variables)

    return stateless_apply


class StateOfFit:
    """Hands what joined the optimizer since `fit` took its state through one call of a train function.

    Args:
        model: With the optimizer as it was when `fit` took the state.
    """

    def __init__(self, model):
        self._model, self._optimizer = model, model.optimizer
        self._own = {id(variable) for variable in self._optimizer.variables} if steps_are_pure() else set()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, a train function of Keras."""
        if not steps_are_pure():
            return function(*args)
        taken, iterator = args
        trainable, others, own, metrics = taken
        known = self._optimizer.variables
        values = iter(own)
        state = [next(values) if id(variable) in self._own else variable.value for variable in known]
        try:
            logs, (trainable, others, state, metrics) = function((trainable, others, state, metrics), iterator)
        except BaseException:
            self._put_back(taken)
            raise
        kept = []
        for variable, value in zip(known, state, strict=True):
            if id(variable) in self._own:
                kept.append(value)
            else:
                # The array that went in is gone: the compiled step was given its memory.
                variable._value = value
        return logs, (trainable, others, kept, metrics)

    def _put_back(self, taken: Sequence[Any]) -> None:
        """Restores the values that `fit` took from the variables, for example after a batch that could not be read.

        `fit` itself would restore the values after its last step, and lose later writes by callbacks: weights from
        before the masks changed.
        """
        owners = self._model.trainable_variables, self._model.non_trainable_variables, self._optimizer.variables
        held = [*owners, self._model.metrics_variables]
        held[2] = [variable for variable in held[2] if id(variable) in self._own]
        rows = [row for pair in zip(held, taken, strict=True) for row in zip(*pair, strict=True)]
        if any(value.is_deleted() for _, value in rows):
            return  # The step began, and was given their memory.
        for variable, value in rows:
            if variable._value is None:
                variable._value = value
        self._model._jax_state_synced = True


@contextlib.contextmanager
def fresh_step(model) -> Iterator[None]:
    """Inside, the model's `train_step` is a function of its own to JAX, which shares traces between equal ones.

    A bound method equals itself: what was traced of it with one mask store would be run with the next.
    """
    if not (steps_are_pure() and hasattr(model, "train_step")):
        yield
        return
    with patching.shadowed(model, "train_step", functools.partial(model.train_step)):
        yield
