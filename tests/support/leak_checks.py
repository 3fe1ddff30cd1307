"""How a cell of the leak matrix is checked: raw variables, read with NumPy, and none of prunekit's own audits."""

from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from backends import sync_model_state

from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner

FTRL_START = np.float32(0.1)
ZERO_MAKERS = (keras.optimizers.Ftrl, keras.optimizers.ScheduleFreeAdamW)


def parts_of(optimizer) -> list[Any]:
    """The optimizer and those inside it."""
    inside = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return [optimizer, *(part for one in inside if one is not None for part in parts_of(one))]


class Leak(AssertionError):
    """A check of the matrix found something."""


def read(variable: keras.Variable) -> np.ndarray:
    """What a variable holds."""
    return np.array(variable.numpy())


def prefix(variable: keras.Variable) -> str:
    """How Keras begins the names of the slots that it makes for this weight."""
    return variable.path.replace("/", "_") + "_"


@dataclass
class Checker:
    """Reads raw variables and remembers which positions were zero."""

    model: keras.Model
    # Whether masks move: pruned positions come back.
    moves: bool = False
    # Whether slots are zero at pruned positions, and what comes back starts at zero.
    starts_at_zero: bool = True
    zeros: dict[str, np.ndarray] = field(default_factory=dict)
    batches: int = 0
    positions: int = 0
    returned: int = 0
    # Whether weights are put on grids at the end.
    rounds: bool = False

    @property
    def makes_zeros(self) -> bool:
        """Whether kept weights can be zero: what comes back starts there, rounding, optimizers without a gradient."""
        return (
            self.moves or self.rounds or any(isinstance(part, ZERO_MAKERS) for part in parts_of(self.model.optimizer))
        )

    @property
    def is_ftrl(self) -> bool:
        """Whether the optimizer is Ftrl, or holds it."""
        return any(isinstance(part, keras.optimizers.Ftrl) for part in parts_of(self.model.optimizer))

    @property
    def weights(self) -> dict[str, keras.Variable]:
        """The weights that the schedule prunes, by path."""
        layers = [self.model.get_layer(name) for name in ("conv", "embedding", "hidden", "logits")]
        return {layer.name: layer.embeddings if layer.name == "embedding" else layer.kernel for layer in layers}

    def slots(self, variable: keras.Variable) -> list[keras.Variable]:
        """The optimizer's variables that were made from this weight, told by name and shape."""
        return [
            slot
            for slot in self.model.optimizer.variables
            if slot.name.startswith(prefix(variable)) and tuple(slot.shape) == tuple(variable.shape)
        ]

    def check(self, where: str) -> None:
        """What was zero at the last `learn` is zero now, in weights and slots; nothing is NaN.

        Raises:
            Leak: It is not so.
        """
        sync_model_state(self.model)
        for name, variable in self.weights.items():
            zero = self.zeros.get(name)
            if zero is None:
                continue
            for held in [variable, *(self.slots(variable) if self.starts_at_zero else ())]:
                # Ftrl divides by this slot, so that zero would become NaN: it holds what Keras starts it with.
                rest = FTRL_START if self.is_ftrl and held.name.removeprefix(prefix(variable)) == "accumulator" else 0
                leaked = np.count_nonzero(read(held)[zero] != rest)
                if leaked:
                    raise Leak(f"{leaked} of {zero.sum()} pruned positions of {held.path} are not {rest} {where}")
                self.positions += int(zero.sum())
        for variable in [*self.model.variables, *self.model.optimizer.variables]:
            if not np.isfinite(read(variable).astype("float64")).all():
                raise Leak(f"{variable.path} holds NaN or infinity {where}")

    def learn(self, masks: dict[str, np.ndarray], asked: float, where: str) -> None:
        """Takes the pruned positions from the masks, and compares them with the zeros there are and were.

        Raises:
            Leak: The count is not exact, a pruned position became non-zero, or zeros and masks differ.
        """
        for name, variable in self.weights.items():
            (mask,) = (mask for target, mask in masks.items() if target.startswith(name + "/"))
            pruned, zero = ~mask, read(variable) == 0
            if pruned.sum() != round(asked * pruned.size):
                raise Leak(f"{pruned.sum()} of {pruned.size} in {name} are pruned; {asked:.4f} was asked for {where}")
            returned = np.count_nonzero(self.zeros.get(name, False) & ~pruned)
            self.returned += returned
            if returned and not self.moves:
                raise Leak(f"pruned positions of {name} came back {where}")
            if np.any(pruned & ~zero):
                raise Leak(f"{np.sum(pruned & ~zero)} pruned positions of {name} are not zero {where}")
            if np.any(zero & ~pruned) and not self.makes_zeros:
                raise Leak(f"{np.sum(zero & ~pruned)} zeros of {name} are not in its mask {where}")
            self.zeros[name] = pruned

    def both(self, pruner: Pruner, where: str) -> None:
        """`check` before and after the zeros of now are learned."""
        if self.starts_at_zero:
            self.check(where)
        if pruner.events:
            self.learn(pruner.masks, pruner.events[-1].asked, where)
            self.check(where)


class Spy(keras.callbacks.Callback):
    """Checks after every n-th execution; one is listed before the PruningCallback and one after it."""

    def __init__(self, checker: Checker, pruning: PruningCallback, every: int = 1, *, last: bool):
        super().__init__()
        self.checker, self.pruning, self.every, self.last = checker, pruning, every, last

    def on_train_begin(self, logs=None):
        self.own = self.model.train_function

    def on_train_batch_end(self, batch, logs=None):
        if batch % self.every:
            return
        if self.every > 1 and self.checker.moves:
            # Masks moved in batches that were not looked at: zeros of then may have come back.
            self.checker.zeros.clear()
        where = f"after batch {batch}, seen {'after' if self.last else 'before'} the PruningCallback"
        if self.last:
            self.checker.both(self.pruning.pruner, where)
            self.checker.batches += 1
        else:
            self.checker.check(where)
        if self.model.train_function is not self.own:
            raise Leak(f"the model's train function is not its own {where}")
        expect_no_trace(self.model, where)


def expect_no_trace(model: keras.Model, where: str) -> None:
    """Nothing of prunekit's hangs on the model, its optimizer or its weights."""
    for owner in [model, *model.layers, *model.variables, *parts_of(model.optimizer)]:
        for name, value in vars(owner).items():
            if _is_ours(value):
                raise Leak(f"{type(owner).__name__}.{name} is prunekit's {value!r} {where}")


def _is_ours(value: Any) -> bool:
    return (getattr(value, "__module__", None) or type(value).__module__).startswith("prunekit")


@dataclass(frozen=True)
class Snapshot:
    """What must be as it was when training is over."""

    kind: type
    config: dict[str, Any]
    constraints: list[Any]
    test_function: Any
    attributes: set[str]
    variables: int

    @classmethod
    def of(cls, model: keras.Model) -> "Snapshot":
        """Of the optimizer as it will be once it is built: a copy of it is built here."""
        optimizer = model.optimizer
        copy = type(optimizer).from_config(optimizer.get_config())
        copy.build(model.trainable_variables)
        return cls(
            kind=type(optimizer),
            config=optimizer.get_config(),
            constraints=[variable.constraint for variable in model.variables],
            test_function=model.test_function,
            attributes=set(vars(copy)),
            variables=len(copy.variables),
        )

    def compare(self, model: keras.Model) -> None:
        """Raises Leak where the model is not as it was."""
        now = Snapshot.of(model)
        optimizer = model.optimizer
        # Keras fills this cache when it decays weights.
        extra = set(vars(optimizer)) - self.attributes - {"_exclude_from_weight_decay_cache"}
        if extra or len(optimizer.variables) != self.variables:
            raise Leak(f"the optimizer has {extra or len(optimizer.variables)} that it had not")
        for name in ("kind", "config", "test_function"):
            if getattr(now, name) != getattr(self, name):
                raise Leak(f"{name} was {getattr(self, name)!r} and is {getattr(now, name)!r}")
        if any(a is not b for a, b in zip(now.constraints, self.constraints, strict=True)):
            raise Leak("the constraints are not the ones that were there")
        expect_no_trace(model, "at the end")
