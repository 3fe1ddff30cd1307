"""Trains further variables with a model for a while, which belong to neither the model nor its optimizer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.core.runtime import backend, jax_state, patching
from prunekit.core.runtime.optimizers import parts_of
from prunekit.sparsity.array_ops import array_of


@contextlib.contextmanager
def joined(model: Any, optimizers: Sequence[Any], variables: Sequence[Any], trainer: Any) -> Iterator[None]:
    """Inside the scope, variables are trainable ones of the model, and an optimizer of their own updates them.

    They stand first in `model.trainable_variables`. The model's optimizers never see them: where a training step
    applies gradients, theirs are split off before anything else is done, such as clipping. A step that does not list
    them leaves them as they are. The model saves and loads its own variables alone. On JAX, the variables of `trainer`
    are among those of the optimizer, as part of the step's state.

    Args:
        model: A built model.
        optimizers: The optimizers that a training step uses.
        variables: Trainable float32 variables.
        trainer: A Keras optimizer that was built for `variables`.
    """
    if not variables:
        yield
        return
    split = _Split(variables, trainer)
    own = model._trainable_variables
    for optimizer in optimizers:
        if jax_state.steps_are_pure() and not optimizer.built:
            optimizer.build(model.trainable_variables)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patching.shadowed(model, "_trainable_variables", [*variables, *own]))
        split.listed = list(model.trainable_variables)
        for name in ("save_own_variables", "load_own_variables", "_check_load_own_variables"):
            wrap = functools.partial(_with_own_alone, model, "_trainable_variables", own)
            stack.enter_context(patching.wrapped(model, name, wrap))
        for optimizer in optimizers:
            stack.enter_context(patching.wrapped(optimizer, "build", split.building))
            stack.enter_context(patching.wrapped(_without_loss_scale(optimizer), "apply", split.applying))
            if jax_state.steps_are_pure():
                part = parts_of(optimizer)[0]
                rows = [(part._trainable_variables[0], one) for one in trainer.variables]
                stack.enter_context(jax_state.in_optimizer_state(optimizer, rows))
                wrap = functools.partial(split.applying_purely, optimizer)
                stack.enter_context(patching.wrapped(optimizer, "stateless_apply", wrap))
        yield


@contextlib.contextmanager
def in_model_state(model: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Inside the scope, a training step on JAX gets the variables as arguments, and may assign them.

    They stand first among the model's variables that are not trained. The model saves and loads its own variables
    alone. On other backends steps read every variable, and nothing is done.

    Args:
        model: A built model.
        variables: Variables with `trainable=False`.
    """
    if not (jax_state.steps_are_pure() and variables):
        yield
        return
    own = model._non_trainable_variables
    with contextlib.ExitStack() as stack:
        stack.enter_context(patching.shadowed(model, "_non_trainable_variables", [*variables, *own]))
        for name in ("save_own_variables", "load_own_variables", "_check_load_own_variables"):
            wrap = functools.partial(_with_own_alone, model, "_non_trainable_variables", own)
            stack.enter_context(patching.wrapped(model, name, wrap))
        yield


def exchange(one: Any, other: Any, names: Sequence[str]) -> None:
    """Gives two objects the variables of each other, and the trainers of these; values stay in place.

    So what was traced with the variables of one serves the other.

    Args:
        one: An object with a `trainer`.
        other: Another one, with variables of the same shapes and a trainer of the same kind.
        names: Attributes that hold variables.
    """
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    pairs += zip(*(getattr(each.trainer, "variables", ()) for each in (one, other)), strict=True)
    for mine, its in pairs:
        first, second = np.array(array_of(mine)), np.array(array_of(its))
        mine.assign(second)
        its.assign(first)
    for name in (*names, "trainer"):
        mine, its = getattr(one, name), getattr(other, name)
        setattr(one, name, its)
        setattr(other, name, mine)


def trainer_for(optimizers: Sequence[Any], variables: Sequence[Any], make: Callable[..., Any]) -> Any:
    """Returns a built optimizer for `variables` that updates them as often as the optimizers update weights.

    Args:
        optimizers: The optimizers of the training step, which may accumulate gradients over several batches.
        variables: The variables.
        make: Makes a Keras optimizer; takes `gradient_accumulation_steps`.
    """
    parts = [part for optimizer in optimizers for part in parts_of(optimizer)]
    trainer = make(gradient_accumulation_steps=next((part.gradient_accumulation_steps for part in parts), None))
    trainer.build(list(variables))
    return trainer


# Options of an optimizer that are about weights, or about all gradients of a step together.
_OF_WEIGHTS = dict.fromkeys(("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor"))


def trainer_like(optimizers: Sequence[Any], variables: Sequence[Any]) -> Any:
    """Returns a built optimizer for `variables`, of the kind and with the learning rate of the first of the optimizers.

    Without weight decay, clipping and averages; Adam where the optimizer's class cannot be made from its config.

    Args:
        optimizers: The optimizers of the training step; at least one.
        variables: The variables.
    """
    part = parts_of(optimizers[0])[0]

    def make(**options: Any) -> Any:
        rate = functools.partial(_rate_of, part)
        config = {"use_ema": False, **_OF_WEIGHTS, **options, "learning_rate": rate}
        try:
            return type(part).from_config({**part.get_config(), **config})
        except Exception:  # noqa: BLE001 (a class of the user's, whose config may not make an optimizer)
            return keras.optimizers.Adam(**config)

    return trainer_for(optimizers, variables, make)


def _rate_of(part: Any) -> Any:
    return part._get_current_learning_rate()


def _without_loss_scale(optimizer: Any) -> Any:
    """Returns the optimizer to which a LossScaleOptimizer hands gradients in their true size."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _with_own_alone(model: Any, name: str, own: list[Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with patching.shadowed(model, name, own):
            return method(*args, **kwargs)

    return run


class _Split:
    """Hands the gradients of the joined variables to their trainer, and the others to the optimizer."""

    def __init__(self, variables: Sequence[Any], trainer: Any):
        self._variables, self._trainer = list(variables), trainer
        # The trainable variables of the model with these, and without those of scopes that are entered later.
        self.listed: list[Any] = []
        # PyTorch's loops apply gradients to the tensors of variables.
        self._index = {id(backend.native(one)): index for index, one in enumerate(self._variables)}

    def building(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the replacement of `optimizer.build`, which LossScaleOptimizer calls with all variables of a step."""

        def build(variables: Any) -> None:
            method([one for one in variables if id(backend.native(one)) not in self._index])

        return build

    def applying(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the replacement of `optimizer.apply`."""

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            if trainable_variables is None:
                return method(grads)
            grads, trainable_variables = list(grads), list(trainable_variables)
            if len(grads) != len(trainable_variables):
                return method(grads, trainable_variables)  # Keras raises the error.
            pairs = zip(grads, trainable_variables, strict=True)
            rows = [(self._index.get(id(backend.native(one))), gradient, one) for gradient, one in pairs]
            others = [(gradient, variable) for index, gradient, variable in rows if index is None]
            ours = [(gradient, self._variables[index]) for index, gradient, _ in rows if index is not None]
            ours = [(gradient, variable) for gradient, variable in ours if gradient is not None]
            if ours:
                # First: the trainer may read the learning rate of the optimizer's present update.
                self._trainer.apply(*map(list, zip(*ours, strict=True)))
                self._clear_gradients()
            return method([gradient for gradient, _ in others], [variable for _, variable in others])

        return apply

    def _clear_gradients(self) -> None:
        # PyTorch adds gradients up, and `model.zero_grad()` does not reach these variables.
        if keras.backend.backend() == "torch":
            for variable in self._variables:
                variable.value.grad = None

    def applying_purely(self, optimizer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the replacement of `optimizer.stateless_apply`."""

        def stateless_apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            places = [self._index.get(id(one)) for one in self.listed]
            if len(trainable_variables) != len(places):
                return method(optimizer_variables, grads, trainable_variables)
            others = [place for place, index in enumerate(places) if index is None]
            ours = [place for place, index in enumerate(places) if index is not None]
            unscaled = self._unscaled(optimizer, optimizer_variables, _at(ours, grads))
            updated, state = method(optimizer_variables, _at(others, grads), _at(others, trainable_variables))
            # With the optimizer's variables of before the update: the trainer may read its learning rate.
            known = [
                *zip(optimizer.variables, optimizer_variables, strict=True),
                *zip(self._variables, _at(ours, trainable_variables), strict=True),
            ]
            with keras.StatelessScope(state_mapping=known) as scope:
                self._trainer.apply(unscaled, self._variables)
            results, state = list(trainable_variables), list(state)
            for place, value in zip(others, updated, strict=True):
                results[place] = value
            for place, variable in zip(ours, self._variables, strict=True):
                results[place] = scope.get_current_value(variable)
            of_trainer = {id(one) for one in self._trainer.variables}
            for slot, variable in enumerate(optimizer.variables):
                if id(variable) in of_trainer:
                    state[slot] = scope.get_current_value(variable)
            return results, state

        return stateless_apply

    def _unscaled(self, optimizer: Any, optimizer_variables: Sequence[Any], gradients: list[Any]) -> list[Any]:
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return gradients
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, optimizer_variables, strict=True))):
            scale = optimizer.dynamic_scale.value
        # An update that the optimizer skips because of such gradients must not move these variables either.
        finite = ops.all(ops.stack([ops.all(ops.isfinite(one)) for one in gradients]))
        return [ops.where(finite, one / scale, ops.zeros_like(one)) for one in gradients]


def _at(places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    return [values[place] for place in places]
