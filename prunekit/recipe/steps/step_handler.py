"""StepHandler: prepares, plans and runs the steps of one kind; the base class of every handler."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import keras
import numpy as np

from prunekit.anatomy.records.reports import Skipped
from prunekit.anatomy.records.sections import Section
from prunekit.recipe.settings.step_kinds import STEP_KINDS
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.text.loader import RecipeError
from prunekit.sparsity.schedules import Schedule


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """A step, resolved for one model and one set of data; handlers that resolve more subclass it.

    Attributes:
        settings: Settings of the step.
        model: Stand-in for the model that the step will return: of the same architecture, with any weights. Later steps
            are prepared for it. None if the step keeps the model.
        schedule: Sparsity schedule in optimizer updates since the start of the step; None if the step has none.
    """

    settings: Any
    model: keras.Model | None = None
    schedule: Schedule | None = None


@dataclass(frozen=True)
class PlannedTarget:
    """One target of a prune step, with its final sparsity and its final number of pruned entries.

    `minimum` and `maximum` are its bounds, `override` is its own sparsity; None where the recipe has none.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    sparsity: float
    pruned: int
    minimum: float | None = None
    maximum: float | None = None
    override: float | None = None


@dataclass(frozen=True)
class PlannedStep:
    """One step of a recipe, resolved.

    Attributes:
        kind: Name of the step's kind, such as "train".
        text: Description of the step in one line.
        epochs: Number of training epochs; None if the step does not train.
        updates: Number of optimizer updates in the step.
        pruning: (optimizer update since the start of the step, requested sparsity) for every mask update.
        targets: Weights that the step prunes.
        skipped: Weights that the step does not prune, with reasons.
        sections: Tables of what else the step will do.
    """

    kind: str
    text: str
    epochs: int | None = None
    updates: int | None = None
    pruning: tuple[tuple[int, float], ...] = ()
    targets: tuple[PlannedTarget, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    sections: tuple[Section, ...] = ()


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step did.

    Attributes:
        model: The model that the run goes on with; None keeps the present one. A model that is not compiled is compiled
            by the recipe's settings; a compiled model keeps its optimizer, slots included.
        masks: Weight name -> mask, True = kept, that replace all masks of earlier steps. None keeps the masks of those
            weights that the model still has under the same name and in the same shape.
        metrics: Metrics and loss on the test data, by name, of what the step made of the model, such as its simulation
            on integers. None has the model evaluated after a step that changes weights.
        history: Metric -> value per epoch.
        sections: Sections of the report, which follow the table of the steps.
        text: One line for the terminal at the end of the step; "" shows metrics and sparsity.
    """

    model: keras.Model | None = None
    masks: Mapping[str, np.ndarray] | None = None
    metrics: dict[str, float] | None = None
    history: dict[str, list[float]] = field(default_factory=dict)
    sections: Sequence[Section] = ()
    text: str = ""


P = TypeVar("P", bound=PreparedStep)


class StepHandler(ABC, Generic[P]):
    """Prepares, plans and runs the steps of one kind; holds no state."""

    @abstractmethod
    def prepare(self, settings: Any, run: RunInputs) -> P:
        """Returns the step, resolved for this run; changes no weight and creates no training state.

        Raises:
            ValueError, TypeError: The step cannot be run; the message continues after "steps[2].prune: ".
        """

    def planned(self, prepared: P, step: PlannedStep) -> PlannedStep:
        """Returns the entry of the plan, starting from `step`: kind, text, epochs and updates."""
        return step

    def plan_notes(self, prepared: P) -> Sequence[str]:
        """Returns notes below the plan; equal notes of several steps are shown once."""
        return ()

    @abstractmethod
    def run(self, prepared: P, workspace: Workspace) -> StepResult:
        """Runs the step on the workspace."""


def handler_of(kind: str) -> StepHandler[Any]:
    """Returns the handler of a kind of step; imports it at the first use.

    Raises:
        TypeError: The factory of the kind's row does not make a `StepHandler`.
    """
    handler = STEP_KINDS.named(kind).load()()
    if not isinstance(handler, StepHandler):
        raise TypeError(f"The factory of the step kind {kind!r} makes a StepHandler. Received: {handler!r}.")
    return handler


def require_backend(backends: Collection[str], name: str) -> None:
    """Raises unless Keras runs on one of `backends`; an empty collection means all.

    Raises:
        RecipeError: Keras runs on another backend; the message starts with `name`.
    """
    found = keras.backend.backend()
    if backends and found not in backends:
        titles = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
        listed = " or ".join(titles.get(backend, backend) for backend in backends)
        raise RecipeError(
            f"{name} needs the {listed} backend. Received: {found}. Leave it out, or run with "
            f"KERAS_BACKEND={next(iter(backends))}."
        )
