"""Support for training steps that are pure functions from old to new state, as on JAX.

The compiler treats every value that such a step reads outside its state as a constant. Masks are therefore added to
the optimizer's variables while they are enforced, and ranges of a quantization to the model's: in `fit`,
`train_on_batch` and every loop that passes `optimizer.variables` to `optimizer.stateless_apply`. On other backends
these functions do nothing.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from prunekit.core.runtime import backend, patching
from prunekit.core.runtime.optimizers import parts_of


def steps_are_pure() -> bool:
    """Returns True if the backend's compiled steps take their variables as arguments."""
    return keras.backend.backend() == "jax"


def sync_model_state(model) -> None:
    """Writes the compiled step's state back to the model's variables; `fit` on JAX keeps the two apart."""
    synchronise = getattr(model, "jax_state_sync", None)
    if synchronise is not None:
        synchronise()


def at_hand(variables: Sequence[Any]) -> bool:
    """Returns True if the variables hold their values: on JAX, `fit` removes the values while its steps run."""
    return all(getattr(variable, "_value", variable) is not None for variable in variables)


def unshare_ema_arrays(optimizers: Sequence[Any]) -> None:
    """Copies the weight averages of optimizers with `use_ema`, so that no average shares its weight's array.

    At the end of `fit` Keras assigns each average to its weight, so both share one array. Compiled steps, including
    those of `evaluate`, donate the memory of their arguments: the average would be lost, or JAX would refuse to
    donate one array twice.
    """
    if steps_are_pure():
        for part in (part for one in optimizers for part in parts_of(one)):
            for average in getattr(part, "_model_variables_moving_average", ()):
                if not average.value.is_deleted():
                    average.assign(keras.ops.copy(average.value))


def progress(optimizers: Sequence[Any]) -> tuple[float, ...]:
    """Returns the optimizers' counters; every update of any of the optimizers changes at least one of the numbers."""
    scales = [one for one in optimizers if isinstance(one, keras.optimizers.LossScaleOptimizer) and one.built]
    # `iterations` does not change while gradients are accumulated. An update that a LossScaleOptimizer skips does not
    # reach its inner optimizer.
    counters = [part._iterations for one in optimizers for part in parts_of(one)]
    counters += [v for one in scales for v in one._variables]
    return tuple(backend.number(counter) for counter in counters)


@contextlib.contextmanager
def in_optimizer_state(optimizer, rows: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Adds variables to those of the optimizer inside the scope, but not to the variables that it saves or loads.

    Args:
        optimizer: The optimizer that the training loop uses.
        rows: Pairs (weight that the optimizer updates, variable that an update of the weight reads or writes).
    """
    if not steps_are_pure():
        yield
        return
    joined = [(part, _guests(part, rows)) for part in _built_parts(optimizer)]
    added = frozenset(id(guest) for _, guests in joined for guest in guests)
    for part, guests in joined:
        part._variables.extend(guests)
    _added_now.append(added)
    with contextlib.ExitStack() as stack:
        for name in ("save_own_variables", "load_own_variables"):
            stack.enter_context(patching.wrapped(optimizer, name, functools.partial(_without, joined)))
        try:
            yield
        finally:
            _added_now.remove(added)
            for part, guests in joined:
                _remove(part, guests)


# The `id` of each variable that a scope of `in_optimizer_state` has added, one set per open scope.
_added_now: list[frozenset[int]] = []


def own_variables(optimizer) -> list[Any]:
    """Returns the optimizer's variables without those that `in_optimizer_state` has added."""
    added = frozenset().union(*_added_now)
    return [variable for variable in optimizer.variables if id(variable) not in added]


def _built_parts(optimizer) -> list[Any]:
    parts = parts_of(optimizer)
    if len(parts) > 1 and not optimizer.built:
        raise RuntimeError(
            f"On JAX each mask is stored in the optimizer that updates its weight. Received: {optimizer.name}, which "
            "is not built. Call optimizer.build(model.trainable_variables) first."
        )
    return parts


def _guests(part, rows) -> list[Any]:
    known = {id(variable) for variable in part._trainable_variables}
    return [guest for variable, guest in rows if id(variable) in known or not part.built]


def _remove(part, guests) -> None:
    leaving = {id(guest) for guest in guests}
    part._variables[:] = [variable for variable in part._variables if id(variable) not in leaving]


def _without(joined, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the optimizer's method as a function that removes the added variables while it runs."""

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
    """Passes `mask(gradients, variables)` to each LossScaleOptimizer, so masked gradients never make it skip a step.

    `LossScaleOptimizer.stateless_apply` tests the gradients for infinity and NaN before it calls any `apply`.
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
    """Adds variables that joined model and optimizer after `fit` took its state to the state of one function call.

    Args:
        model: The model; it and its optimizer must have the variables that they had when `fit` took the state.
    """

    def __init__(self, model):
        self._model = model
        self._own = self._ids() if steps_are_pure() else (set(), set(), set())

    def _ids(self) -> tuple[set[int], set[int], set[int]]:
        # What joins a model stands first, among the variables that belong to none of its layers.
        optimizer = getattr(self._model, "optimizer", None)
        held = self._model._trainable_variables, () if optimizer is None else optimizer.variables
        first, second, third = ({id(one) for one in part} for part in (*held, self._model.non_trainable_variables))
        return first, second, third

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(*args)`, where `function` is a train or test function of Keras."""
        if not steps_are_pure():
            return function(*args)
        taken, iterator = args
        joined = [one for one in self._model._trainable_variables if id(one) not in self._own[0]]
        trainable, others, *optimizer, metrics = taken
        known = self._model.non_trainable_variables
        all_others = self._with_guests(others, known, self._own[2])
        slots = [self._with_guests(one, self._model.optimizer.variables, self._own[1]) for one in optimizer]
        state = [[*(one.value for one in joined), *trainable], all_others, *slots, metrics]
        try:
            logs, (trainable, others, *optimizer, metrics) = function(tuple(state), iterator)
        except BaseException:
            self._put_back(taken)
            raise
        for variable, value in zip(joined, trainable, strict=False):
            # The input array no longer exists: the compiled step was given its memory.
            variable._value = value
        kept = trainable[len(joined) :], self._without_guests(others, known, self._own[2])
        slots = [self._without_guests(one, self._model.optimizer.variables, self._own[1]) for one in optimizer]
        return logs, (*kept, *slots, metrics)

    @staticmethod
    def _with_guests(taken: Sequence[Any], known: Sequence[Any], own: set[int]) -> list[Any]:
        values = iter(taken)
        return [next(values) if id(variable) in own else variable.value for variable in known]

    @staticmethod
    def _without_guests(state: Sequence[Any], known: Sequence[Any], own: set[int]) -> list[Any]:
        kept = []
        for variable, value in zip(known, state, strict=True):
            if id(variable) in own:
                kept.append(value)
            else:
                variable._value = value
        return kept

    def _put_back(self, taken: Sequence[Any]) -> None:
        """Restores the values that `fit` took from the variables, for example after a batch could not be read.

        `fit` itself would restore the values after its last step and lose later writes by callbacks: the weights
        would have their values from before the masks changed.
        """
        model = self._model
        joined = {id(one) for one in model._trainable_variables} - self._own[0]
        held = [
            [one for one in model.trainable_variables if id(one) not in joined],
            [one for one in model.non_trainable_variables if id(one) in self._own[2]],
        ]
        if len(taken) > _STATE_OF_TESTS:
            held.append([variable for variable in model.optimizer.variables if id(variable) in self._own[1]])
        held.append(model.metrics_variables)
        rows = [row for pair in zip(held, taken, strict=True) for row in zip(*pair, strict=True)]
        if any(value.is_deleted() for _, value in rows):
            return  # The step had begun and was given the arrays' memory.
        for variable, value in rows:
            if variable._value is None:
                variable._value = value
        model._jax_state_synced = True


# Lists of values in the state of a test step: trainable, other and metrics variables.
_STATE_OF_TESTS = 3


@contextlib.contextmanager
def fresh_step(model, name: str = "train_step") -> Iterator[None]:
    """Gives the model a new `train_step` object inside the scope; JAX shares traces between equal functions.

    Bound methods of one model are equal, so JAX would reuse a step traced with one mask store for the next store.

    Args:
        model: The model.
        name: Name of the step: "train_step" or "test_step".
    """
    if not (steps_are_pure() and hasattr(model, name)):
        yield
        return
    with patching.shadowed(model, name, functools.partial(getattr(model, name))):
        yield
