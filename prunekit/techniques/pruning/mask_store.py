"""MaskStore: the only owner of mask state, and what keeps pruned weights at zero inside every optimizer update."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.targets import Target
from prunekit.core import backend, compilation, jax_state, patching
from prunekit.core.optimizers import parts_of
from prunekit.sparsity.selection import count_true


class LeakError(RuntimeError):
    """Pruned positions became non-zero: something updates the weights without passing through the optimizer."""


# Optimizers whose slots start at zero and stay at exactly zero where every gradient is zero. Their slots are cleared
# when masks change and need no work after that; the slots of any other class are masked in every update.
_KEEP_ZERO_SLOTS = frozenset(
    getattr(keras.optimizers, name)
    for name in "Adadelta Adam AdamW Adamax Lamb Lion Muon Nadam RMSprop SGD ScheduleFreeAdamW".split()
    if hasattr(keras.optimizers, name)
)


class MaskStore:
    """One boolean mask variable per target, True = kept, and their enforcement.

    Args:
        targets: The weights to mask; each variable once.
        model: Says under which distribution strategy the mask variables are created.
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
        # Held by the optimizer's `apply`, and so holds its owner as long: zeros outlive a pruner that is dropped.
        self.owner: Any = None
        self._enforced_slots: tuple[int, ...] = ()
        self._impose = compilation.compiled_effect(lambda: self._zero_all(()))
        self._count_leaks = compilation.compiled_effect(self._leaks)

    @property
    def masks(self) -> dict[str, np.ndarray]:
        """Target name -> boolean array, True = kept."""
        return {t.name: np.array(mask.numpy()) for t, mask in zip(self.targets, self._masks, strict=True)}

    @property
    def updates(self) -> int:
        """How many optimizer updates were enforced so far."""
        return int(self._updates.numpy())

    def mask(self, index: int):
        """The mask of the index-th target, as a tensor on the device."""
        return backend.value_now(self._masks[index])

    def replace(self, masks: Sequence[Any], optimizers: Sequence[Any] = ()) -> None:
        """Takes new masks, one per target, and imposes them on the weights and on every slot of the optimizers.

        Raises:
            ValueError: Another number of masks than of targets, or a mask of another shape; none was taken.
        """
        shapes = [tuple(mask.shape) if hasattr(mask, "shape") else None for mask in masks]
        if shapes != [target.shape for target in self.targets]:
            raise ValueError(
                f"One mask for each target, of its shape: {[target.shape for target in self.targets]}. "
                f"Received: {shapes}."
            )
        for variable, mask in zip(self._masks, masks, strict=True):
            variable.assign(mask)
        self.enforce(optimizers)

    def enforce(self, optimizers: Sequence[Any] = ()) -> None:
        """Sets weights, and the optimizers' slots, to zero at pruned positions, now."""
        slots = [(part, *row) for optimizer in optimizers for part in parts_of(optimizer) for row in self._slots(part)]
        key = tuple(id(slot) for *_, slot in slots)
        if key != self._enforced_slots:
            # Optimizers make their slots at the first update, so what there is to do can grow once.
            self._enforced_slots, self._impose = key, compilation.compiled_effect(lambda: self._zero_all(slots))
        self._impose()

    def _zero_all(self, slots) -> None:
        for target, mask in zip(self.targets, self._masks, strict=True):
            backend.fill_outside(mask, target.variable)
        for part, index, name, slot in slots:
            backend.fill_outside(self._masks[index], slot, _at_rest(part, name))

    def audit(self) -> dict[str, int]:
        """Target name -> number of leaks: pruned positions whose weight is not exactly zero (NaN counts)."""
        return {t.name: int(n) for t, n in zip(self.targets, ops.convert_to_numpy(self._count_leaks()), strict=True)}

    def _leaks(self):
        masks = [ops.convert_to_tensor(mask) for mask in self._masks]
        weights = [ops.convert_to_tensor(target.variable) for target in self.targets]
        # Elsewhere it is compiled with its variables, by `compiled_effect`.
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
                # The mask would be broadcast to it, in silence.
                raise ValueError(
                    f"The gradient of a variable of shape {tuple(variable.shape)} has that shape. "
                    f"Received: {tuple(gradient.shape)}, for {variable.name}."
                )
            masked.append(_masked(gradient, self._masks[index]))
        return masked

    @contextlib.contextmanager
    def enforcing(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """Inside, every update of the optimizers masks gradients first and weights last, also when traced.

        An exception leaves the weights sparse, even one that struck between an eager update and its enforcement.

        On JAX the masks are among `optimizer.variables` inside, and travel with the state of the step.
        """
        with self._masks_in_state(optimizers), patching.around_updates(optimizers, self._enforced):
            try:
                yield
            except GeneratorExit:
                # Nobody left: the scope's owner was collected as garbage, at no moment for touching weights.
                raise
            except BaseException:
                if not backend.inside_graph() and jax_state.at_hand([target.variable for target in self.targets]):
                    self.enforce(optimizers)
                raise

    @contextlib.contextmanager
    def _masks_in_state(self, optimizers: Sequence[Any]) -> Iterator[None]:
        rows = [(target.variable, mask) for target, mask in zip(self.targets, self._masks, strict=True)]
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers:
                stack.enter_context(jax_state.masks_in_optimizer_state(optimizer, rows))
            stack.enter_context(jax_state.before_scale_checks(optimizers, self.mask_gradients))
            yield

    def _enforced(self, optimizer, update, gradients: Sequence[Any], variables: Sequence[Any]):
        with self.before_constraints(variables), _safe_divisions(optimizer):
            result = update(self.mask_gradients(gradients, variables))
        self.after_update(optimizer, variables)
        return result

    @contextlib.contextmanager
    def before_constraints(self, variables: Sequence[Any]) -> Iterator[None]:
        """Inside, constraints of the user's (a norm of each column, say) see weights that are zero where pruned.

        Muon's update mixes positions: without this, the norm would count weights that are zero a moment later.
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
        """The part of an update that follows the optimizer's own; runs inside the compiled step."""
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
        """(index of the target, attribute, slot) of each state that the optimizer holds for a weight of ours.

        Keras has no register of slots: each optimizer keeps lists aligned with `_trainable_variables`, or a dictionary
        keyed by variable. Factored states have another shape, and no position to clear.
        """
        if not part.built:
            return []
        places = {id(backend.native(v)): i for i, v in enumerate(part._trainable_variables)}
        ours = [(i, places[key]) for key, i in self._index.items() if key in places]
        found = []
        for name, held in vars(part).items():
            if name in ("_variables", "_trainable_variables"):
                continue
            for index, place in ours:
                variable = self.targets[index].variable
                slot = _entry(held, place, len(places), part, variable)
                same = isinstance(slot, keras.Variable) and tuple(slot.shape) == tuple(variable.shape)
                if same and slot is not variable:
                    found.append((index, name, slot))
        return found


@functools.cache
def _leak_counter():
    return compilation.compiled(_leak_counts)


def _leak_counts(masks, weights):
    return ops.stack([count_true(leaking(*pair)) for pair in zip(masks, weights, strict=True)])


def leaking(mask, weight):
    """Boolean tensor, True where a pruned position's weight is not exactly zero."""
    mask, weight = ops.convert_to_tensor(mask), ops.convert_to_tensor(weight)
    return ops.logical_and(ops.logical_not(mask), ops.not_equal(weight, 0))


@contextlib.contextmanager
def _safe_divisions(optimizer) -> Iterator[None]:
    """Inside, Adafactor divides zero by what float32 can hold.

    Where a whole row and a whole column are pruned, its v = r * c / mean(r) is about 1e-60 by Keras's default and 0 in
    float32: 0 / 0 is NaN, and the root mean square of the update carries it to every weight.
    """
    with contextlib.ExitStack() as stack:
        for part in parts_of(optimizer):
            if isinstance(part, keras.optimizers.Adafactor):
                stack.enter_context(patching.shadowed(part, "epsilon_1", max(part.epsilon_1, 1e-16)))
        yield


@dataclass(frozen=True, eq=False)
class _Masked:
    """A constraint that is given the weight with its pruned positions at zero."""

    inner: Any
    mask: Any

    def __call__(self, weight):
        return self.inner(backend.select(self.mask, weight))


def _at_rest(part, name: str) -> float:
    """What a slot holds at a pruned position: zero, but for Ftrl's accumulator the value that Keras starts it with.

    Ftrl divides by it: 0 / 0 would be NaN in the next training, when nothing is masked any more.
    """
    divisor = isinstance(part, keras.optimizers.Ftrl) and name == "_accumulators"
    return part.initial_accumulator_value if divisor else 0.0


def _masked(gradient, mask):
    # The type's name, since a tensor of PyTorch has methods named indices and values.
    if type(gradient).__name__ == "IndexedSlices":
        import tensorflow as tf

        rows = tf.gather(ops.convert_to_tensor(mask), gradient.indices)
        values = tf.where(rows, gradient.values, tf.zeros((), gradient.values.dtype))
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return backend.select(mask, gradient)


def _is_another(shape, expected) -> bool:
    """Whether a shape, which in a graph may be known in part or not at all, cannot be the one expected."""
    if getattr(shape, "rank", 0) is None:
        return False
    found = tuple(shape)
    return len(found) != len(expected) or any(a not in (None, b) for a, b in zip(found, expected, strict=True))


def _drifts(part, name: str) -> bool:
    """Whether an update can make the slot non-zero at a pruned position although the gradient there is zero."""
    # The average is taken after the update and before this store acts: an update that mixes positions
    # (Muon's orthogonalisation) or a constraint of the user's would enter it, and Keras writes it back later.
    return _public_class(part) not in _KEEP_ZERO_SLOTS or name == "_model_variables_moving_average"


def _public_class(part) -> type:
    """The class in `keras.optimizers`; on PyTorch, Keras makes many an instance of a subclass with the same rule."""
    own = (kind for kind in type(part).__mro__ if not kind.__module__.startswith("keras.src.backend."))
    return next(own)


def _entry(held, place: int, count: int, part, variable):
    if isinstance(held, list | tuple):
        return held[place] if len(held) == count else None
    if isinstance(held, dict) and hasattr(part, "_var_key"):
        return held.get(part._var_key(variable))
    return None
