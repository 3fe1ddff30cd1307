"""MaskStore: owns the masks and keeps pruned weights at zero inside every optimizer update."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.targets import Target
from prunekit.core.runtime import backend, compilation, jax_state, patching
from prunekit.core.runtime.optimizers import parts_of, slots_of
from prunekit.sparsity.array_ops import SMALL, array_of
from prunekit.sparsity.selection import count_true


class LeakError(RuntimeError):
    """Raised when pruned positions became non-zero: code other than the optimizer wrote the weights."""


# Optimizers whose slots start at zero and stay at exactly zero where every gradient is zero. Their slots are cleared
# when masks change and need no work after that; the slots of any other class are masked in every update.
_KEEP_ZERO_SLOTS = frozenset(
    getattr(keras.optimizers, name)
    for name in "Adadelta Adam AdamW Adamax Lamb Lion Muon Nadam RMSprop SGD ScheduleFreeAdamW".split()
    if hasattr(keras.optimizers, name)
)


# The attribute of an optimizer with `use_ema` that holds the averages of the weights.
AVERAGES = "_model_variables_moving_average"
# Number of calls of `enforce` after which a trace would have been quicker than single operations: where all targets are
# small, and where one is large (TensorFlow runs single operations of large weights one after another).
_CALLS_BEFORE_TRACE = {False: 64, True: 3}


class MaskStore:
    """One boolean mask variable per target, True = kept, and their enforcement.

    Args:
        targets: The weights to mask; each variable once.
        model: Model whose distribution strategy, if any, is the scope of the mask variables' creation.
    """

    def __init__(self, targets: Sequence[Target], model):
        self.targets = tuple(targets)
        with backend.variable_scope(model):
            self._masks = [
                keras.Variable(np.ones(target.shape, bool), dtype="bool", trainable=False, name="mask")
                for target in self.targets
            ]
            # Counts the updates that passed through `enforcing`, on the device, inside the compiled step.
            self._updates = keras.Variable(
                0, dtype="int", trainable=False, name="updates", aggregation="only_first_replica"
            )
        self._index = {id(backend.native(target.variable)): i for i, target in enumerate(self.targets)}
        # The optimizer's wrapped `apply` references this store; the reference here keeps the owning Pruner alive as
        # long, so masks stay enforced after the user drops the Pruner.
        self.owner: Any = None
        # Single operations on variables of one device need no trace; on variables of several devices they are slow.
        self._needs_trace = keras.backend.backend() == "tensorflow" and not all(
            backend.has_own_handle(variable)
            for target in self.targets
            for variable in (target.variable, self._masks[0])
        )
        self._is_large = any(target.size > SMALL for target in self.targets)
        self._calls = 0
        self._enforced_slots: tuple[int, ...] | None = None
        self._count_leaks = compilation.compiled_effect(self._leaks) if self._needs_trace else self._leaks

    @property
    def masks(self) -> dict[str, np.ndarray]:
        """Target name -> boolean array, True = kept."""
        return {t.name: np.array(array_of(mask)) for t, mask in zip(self.targets, self._masks, strict=True)}

    @property
    def pruned_values(self) -> dict[str, np.ndarray]:
        """Target name -> values at pruned positions; empty where these are not kept."""
        return {}

    def restore_pruned_values(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets what `pruned_values` returned."""

    @property
    def updates(self) -> int:
        """Number of optimizer updates enforced so far."""
        return int(backend.number(self._updates))

    def reset(self) -> None:
        """Keeps every position again, and counts updates from 0; weights are not changed."""
        for target, mask in zip(self.targets, self._masks, strict=True):
            backend.assign_same(mask, np.ones(target.shape, bool))
        self._updates.assign(0)
        self.owner = None

    def copy(self, model) -> "MaskStore":
        """Returns a store with the same masks and count of updates in variables of its own."""
        other = MaskStore(self.targets, model)
        for mine, its in zip(self._masks, other._masks, strict=True):
            its.assign(backend.value_now(mine))
        other._updates.assign(backend.value_now(self._updates))
        return other

    def all_weights(self) -> contextlib.AbstractContextManager:
        """Returns the context manager in which a policy reads the weights of a mask update."""
        return contextlib.nullcontext()

    def mask(self, index: int):
        """Returns the mask of the index-th target as a tensor on the device."""
        return backend.value_now(self._masks[index])

    def named(self, counts: Iterable[int]) -> str:
        """Returns "name (count)" of each target whose count is not 0, as text for a message."""
        return ", ".join(f"{target.name} ({n})" for target, n in zip(self.targets, counts, strict=True) if n)

    def replace(self, masks: Sequence[Any], optimizers: Sequence[Any] = ()) -> None:
        """Assigns new masks, one per target, and enforces them on the weights and all optimizer slots.

        Raises:
            ValueError: As `assign`.
        """
        self.assign(masks)
        self.enforce(optimizers)

    def assign(self, masks: Sequence[Any]) -> None:
        """Assigns new masks, one per target; weights and slots are not changed.

        Raises:
            ValueError: The number or shapes of the masks differ from those of the targets; no mask was changed.
        """
        shapes = [tuple(mask.shape) if hasattr(mask, "shape") else None for mask in masks]
        if shapes != [target.shape for target in self.targets]:
            raise ValueError(
                f"Expected one mask of the shape of each target: {[target.shape for target in self.targets]}. "
                f"Received: {shapes}."
            )
        for variable, mask in zip(self._masks, masks, strict=True):
            backend.assign_same(variable, mask if _is_boolean(mask) else ops.cast(mask, "bool"))

    def enforce(self, optimizers: Sequence[Any] = ()) -> None:
        """Sets the weights and the optimizers' slots to zero at pruned positions, immediately."""
        slots = [(part, *row) for optimizer in optimizers for part in parts_of(optimizer) for row in self._slots(part)]
        self._calls += 1
        if not self._needs_trace and self._calls <= _CALLS_BEFORE_TRACE[self._is_large]:
            self._zero_all(slots)
            return
        key = tuple(id(slot) for *_, slot in slots)
        if key != self._enforced_slots:
            # Optimizers create their slots at the first update, so the list of slots can grow once.
            self._enforced_slots, self._impose = key, compilation.compiled_effect(lambda: self._zero_all(slots))
        self._impose()

    def _zero_all(self, slots) -> None:
        rows = [(mask, target.variable, 0.0) for target, mask in zip(self.targets, self._masks, strict=True)]
        rows += [(self._masks[index], slot, _at_rest(part, name)) for part, index, name, slot in slots]
        backend.fill_all_outside(rows)

    def audit(self) -> dict[str, int]:
        """Returns {target name: number of leaks}; a leak is a pruned position that is not exactly zero (NaN counts)."""
        return {t.name: int(n) for t, n in zip(self.targets, ops.convert_to_numpy(self._count_leaks()), strict=True)}

    def _leaks(self):
        masks = [backend.value_now(mask) for mask in self._masks]
        weights = [backend.value_now(target.variable) for target in self.targets]
        return (_leak_counter() if jax_state.steps_are_pure() else _leak_counts)(masks, weights)

    def mask_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients, aligned with `variables`, zero at pruned positions.

        None stays None; tf.IndexedSlices stay sparse; a gradient that is infinite or NaN at a pruned position is zero.
        """
        expected = f"Gradients are a list aligned with the {len(variables)} trainable variables"
        if not isinstance(gradients, list | tuple):
            raise TypeError(f"{expected}. Received: {type(gradients).__name__}.")
        if len(gradients) != len(variables):
            raise ValueError(f"{expected}. Received: {len(gradients)}.")
        masked = []
        for gradient, variable in zip(gradients, variables, strict=True):
            index = self._index.get(id(backend.native(variable)))
            if gradient is None or index is None:
                masked.append(gradient)
                continue
            if _is_another(gradient.shape, variable.shape):
                # Otherwise the mask would be broadcast to the gradient silently.
                raise ValueError(
                    f"A gradient must have the shape of its variable. Received: {tuple(gradient.shape)} for "
                    f"{variable.name} of shape {tuple(variable.shape)}."
                )
            masked.append(_masked(gradient, self._masks[index]))
        return masked

    @contextlib.contextmanager
    def enforcing(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """Context manager in which every optimizer update masks gradients first and weights last, also when traced.

        If the block raises, the masks are enforced again, so the weights stay sparse even if an exception interrupts
        an eager update. On JAX, `optimizer.variables` contains the masks inside the block, as part of the step's state.
        """
        with self._masks_in_state(optimizers), patching.around_updates(optimizers, self._enforced):
            try:
                yield
            except GeneratorExit:
                # The scope's owner was garbage-collected, which may happen at any moment: do not write weights here.
                raise
            except BaseException:
                if not backend.inside_graph() and jax_state.at_hand([target.variable for target in self.targets]):
                    self.enforce(optimizers)
                raise

    def _guests(self) -> list[tuple[Any, Any]]:
        """Returns (weight, variable that an update of the weight reads or writes) for the state of pure steps."""
        return [(target.variable, mask) for target, mask in zip(self.targets, self._masks, strict=True)]

    @contextlib.contextmanager
    def _masks_in_state(self, optimizers: Sequence[Any]) -> Iterator[None]:
        rows = self._guests()
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers:
                stack.enter_context(jax_state.in_optimizer_state(optimizer, rows))
            stack.enter_context(jax_state.before_scale_checks(optimizers, self.mask_gradients))
            yield

    def _enforced(self, optimizer, update, gradients: Sequence[Any], variables: Sequence[Any]):
        with self.before_constraints(variables), _safe_divisions(optimizer):
            result = update(self.mask_gradients(gradients, variables))
        self.after_update(optimizer, variables)
        return result

    @contextlib.contextmanager
    def before_constraints(self, variables: Sequence[Any]) -> Iterator[None]:
        """Context manager in which the variables' constraints (such as a column norm) receive masked weights.

        Muon's update mixes positions, so without masking the norm would include weights that are then set to zero.
        """
        constrained = [
            (variable, variable.constraint, self._masks[self._index[id(backend.native(variable))]])
            for variable in variables
            if id(backend.native(variable)) in self._index and getattr(variable, "constraint", None) is not None
        ]
        try:
            for variable, constraint, mask in constrained:
                variable.constraint = _Masked(constraint, mask)
            yield
        finally:
            for variable, constraint, _ in constrained:
                variable.constraint = constraint

    def after_update(self, optimizer, variables: Sequence[Any]) -> None:
        """Masks weights and drifting slots after the optimizer's update; runs inside the compiled step."""
        for variable in variables:
            index = self._index.get(id(backend.native(variable)))
            if index is not None:
                backend.fill_outside(self._masks[index], self.targets[index].variable)
        for part in parts_of(optimizer):
            for index, name, slot in self._slots(part):
                if _drifts(part, name):
                    backend.fill_outside(self._masks[index], slot, _at_rest(part, name))
        if not jax_state.steps_are_pure():
            self._updates.assign_add(1)

    def _slots(self, part) -> list[tuple[int, str, Any]]:
        """Returns (target index, attribute name, slot) for each optimizer slot of a target."""
        return slots_of(part, {i: self.targets[i].variable for i in self._index.values()})


def _is_boolean(mask) -> bool:
    return keras.backend.standardize_dtype(mask.dtype) == "bool"


@functools.cache
def _leak_counter():
    return compilation.compiled(_leak_counts)


def _leak_counts(masks, weights):
    return ops.stack([_leak_count(*pair) for pair in zip(masks, weights, strict=True)])


def _leak_count(mask, weight):
    if backend.is_small_on_host(weight):
        mask, weight = array_of(mask), array_of(weight)
        return np.int32(np.count_nonzero(np.logical_and(weight != 0, np.logical_not(mask))))
    return _large_leak_count()(mask, weight)


@functools.cache
def _large_leak_count():
    return compilation.compiled(lambda mask, weight: count_true(leaking(mask, weight)))


def leaking(mask, weight):
    """Returns a boolean tensor, True at pruned positions whose weight is not exactly zero."""
    mask, weight = ops.convert_to_tensor(mask), ops.convert_to_tensor(weight)
    return ops.logical_and(ops.logical_not(mask), ops.not_equal(weight, 0))


@contextlib.contextmanager
def _safe_divisions(optimizer) -> Iterator[None]:
    """Context manager that raises Adafactor's `epsilon_1` to at least 1e-16, which avoids 0 / 0 in float32.

    Where a whole row and a whole column are pruned, v = r * c / mean(r) is about 1e-60 with Keras's default, which is
    0 in float32: 0 / 0 is NaN, and the root mean square of the update spreads the NaN to every weight.
    """
    with contextlib.ExitStack() as stack:
        for part in parts_of(optimizer):
            if isinstance(part, keras.optimizers.Adafactor):
                stack.enter_context(patching.shadowed(part, "epsilon_1", max(part.epsilon_1, 1e-16)))
        yield


@dataclass(frozen=True, eq=False)
class _Masked:
    """Applies the constraint `inner` to the masked weight."""

    inner: Any
    mask: Any

    def __call__(self, weight):
        return self.inner(backend.select(self.mask, weight))


def _at_rest(part, name: str) -> float:
    """Returns a slot's value at pruned positions: 0, except Keras's initial value for Ftrl's accumulator.

    Ftrl divides by its accumulator: with 0, a later training without masks would compute 0 / 0 = NaN.
    """
    divisor = isinstance(part, keras.optimizers.Ftrl) and name == "_accumulators"
    return part.initial_accumulator_value if divisor else 0.0


def _masked(gradient, mask):
    # Tests the type's name, because a PyTorch tensor also has methods named `indices` and `values`.
    if type(gradient).__name__ == "IndexedSlices":
        import tensorflow as tf

        rows = tf.gather(ops.convert_to_tensor(mask), gradient.indices)
        values = tf.where(rows, gradient.values, tf.zeros((), gradient.values.dtype))
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return backend.select(mask, gradient)


def _is_another(shape, expected) -> bool:
    """Returns True if a shape, possibly partly unknown in a graph, is incompatible with the expected shape."""
    if getattr(shape, "rank", 0) is None:
        return False
    found = tuple(shape)
    return len(found) != len(expected) or any(a not in (None, b) for a, b in zip(found, expected, strict=True))


def _drifts(part, name: str) -> bool:
    """Returns True if an update can make the slot non-zero at a pruned position although the gradient there is zero."""
    # Keras averages weights after the update but before this store masks them, and writes the average back later. So
    # the average can contain non-zeros of an update that mixes positions (Muon) or of the user's constraint.
    return _public_class(part) not in _KEEP_ZERO_SLOTS or name == AVERAGES


def _public_class(part) -> type:
    """Returns the optimizer's public Keras class; on PyTorch, Keras instantiates private subclasses of it."""
    own = (kind for kind in type(part).__mro__ if not kind.__module__.startswith("keras.src.backend."))
    return next(own)
