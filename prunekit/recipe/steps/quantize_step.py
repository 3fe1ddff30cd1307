"""The handler of the step kind quantize."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.core.layerwise.layerwise import Progress as LayerProgress
from prunekit.core.outputs.baseline import Baseline
from prunekit.operations.choose_bits import choose_bits
from prunekit.operations.quantization_callback import QuantizationCallback
from prunekit.operations.quantization_training import training_options
from prunekit.operations.quantize import outputs_of
from prunekit.recipe.settings.quantize_settings import Quantize
from prunekit.recipe.state.checkpoint import from_plain, plain_fields
from prunekit.recipe.state.export_samples import export_samples, metrics_on_samples
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.cluster_step import trained_clusters
from prunekit.recipe.steps.distillation import distillation, prepared_teacher
from prunekit.recipe.steps.integer_files import metrics_before, metrics_sections, written_integers
from prunekit.recipe.steps.prune_step import calibration_data
from prunekit.recipe.steps.step_handler import PlannedStep, PreparedStep, StepHandler, StepResult, require_backend
from prunekit.techniques.quantize.after_training import planned_quantization, quantize_model
from prunekit.techniques.quantize.bits.bit_choice import BitChoice
from prunekit.techniques.quantize.bits.bit_search import budget_problem
from prunekit.techniques.quantize.options import QuantizationOptions, TrainingKeywords
from prunekit.techniques.quantize.preparation import Preparation, few_bits_notes
from prunekit.techniques.quantize.quantization_report import PlannedQuantization
from prunekit.techniques.quantize.quantization_state import QuantizationState

# Options besides those of training.
_TRAINING_OPTIONS = tuple(TrainingKeywords.__annotations__)
_OPTIONS_OF_ROUNDING = ("method", "correct_biases", "equalize", "rate", "sparsity", "pattern")
# Share of the step's progress after which bits are chosen.
_CHOSEN = 0.3


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedQuantize(PreparedStep):
    """A quantize step, with what it quantizes.

    Attributes:
        options: Options of the quantization.
        plan: Bits, granularity and range rule of each weight and tensor, and what stays in floating point.
        notes: Notes below the plan.
        teacher: The teacher in the file that the step names, or None.
    """

    options: QuantizationOptions
    plan: PlannedQuantization
    notes: tuple[str, ...] = ()
    teacher: Any = None


class QuantizeStep(StepHandler[PreparedQuantize]):
    """Puts the weights on integer grids, after training or in training, and writes the integer file."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedQuantize:
        """Returns the step with what it would quantize in the model as it is now.

        Raises:
            ValueError: A pattern matches nothing, the model's calls cannot be followed, there are no data, or the
                budget is below the bytes of the fewest bits.
            RecipeError: Keras runs on a backend without LiteRT files.
        """
        require_backend(("tensorflow",), "the step quantize, which writes a LiteRT file,")
        options = _options(settings)
        options.with_data(run.data)
        export_samples(run.model, run.data, run.recipe.seed)
        if settings.drop is not None and not run.metrics:
            raise ValueError("drop is about the main metric. Received: a recipe without data or compile settings.")
        plan = planned_quantization(run.model, options)
        bits = settings.candidates or [int(row[2]) for row in plan.weights]
        notes = (*few_bits_notes(bits), *_budget_notes(settings, options, run))
        if settings.candidates:
            bits = " or ".join(map(str, settings.candidates))
            plan = dataclasses.replace(plan, weights=tuple((*row[:2], bits, *row[3:]) for row in plan.weights))
        teacher = prepared_teacher(settings.distill, run)
        return PreparedQuantize(settings, options=options, plan=plan, notes=notes, teacher=teacher)

    def planned(self, prepared: PreparedQuantize, step: PlannedStep) -> PlannedStep:
        """Returns the entry of the plan, with tables of the weights and of the tensors between layers."""
        return dataclasses.replace(step, sections=prepared.plan.sections())

    def plan_notes(self, prepared: PreparedQuantize) -> Sequence[str]:
        """Returns notes on bits that files store as more, and on a budget that the planned model would exceed."""
        return prepared.notes

    def run(self, prepared: PreparedQuantize, workspace: Workspace) -> StepResult:
        """Quantizes the model, measures the simulation, and writes and measures the file."""
        workspace.remember_before()
        settings, run, state = prepared.settings, workspace.run, workspace.state
        data = calibration_data(run, settings.examples)
        samples, labels = export_samples(workspace.model, run.data, run.recipe.seed)
        before = metrics_before(workspace, samples)

        history: dict[str, list[float]] = {}
        taught: list[Any] = []
        # A resumed training has other weights by now, for which other bits might be chosen.
        known = state.own.get("bit_choice")
        choice = _choice(prepared, workspace, data) if known is None else from_plain(BitChoice, known)
        state.own["bit_choice"] = None if choice is None else plain_fields(choice)
        options = prepared.options if choice is None else dataclasses.replace(prepared.options, bits=choice.bits)
        if settings.epochs is None:
            floats = outputs_of(workspace.model, samples)
            start = 0.0 if choice is None else _CHOSEN
            found = _after_training(
                options, workspace, data, workspace.step_progress("{}", start, 0.5), settings.memory
            )
        else:
            taught = distillation(settings.distill, prepared.teacher, workspace)
            found, history = _in_training(settings, options, workspace, data, taught)
            # With weights on grids. A run that resumes inside the training does not have the model from before it.
            floats = outputs_of(workspace.model, samples)
        workspace.report_progress(0.5, "measuring the simulation")
        with found.simulating():
            simulated = workspace.evaluate()
            on_samples = metrics_on_samples(run, workspace.model, samples, simulated)
        workspace.report_progress(0.7, "writing the integer file")
        row, sections, text = written_integers(
            found, samples, floats, workspace, labels, settings.file, settings.integer_io, sparse=settings.sparse
        )
        state.exports.append(row)
        if settings.sparsity is not None:
            state.targets += [one.name for one in found.report.weights if one.name not in state.targets]
        for note in found.report.notes:
            workspace.note(f"quantize: {note}")
        return StepResult(
            metrics=simulated,
            history=history,
            sections=[
                *metrics_sections(before, on_samples, row),
                *([] if choice is None else choice.sections()),
                *found.report.sections(),
                *(part for one in taught for part in one.report.sections()),
                *sections,
            ],
            text=text,
        )


def _budget_notes(settings: Quantize, options: QuantizationOptions, run: RunInputs) -> tuple[str, ...]:
    """Returns a note if the planned model exceeds the budget, but the model of the run may be smaller.

    Raises:
        ValueError: The model exceeds the budget, and no step makes it smaller.
    """
    if settings.budget is None or run.data is None:
        return ()
    preparation = Preparation(run.model, options, run.data.train.calibration_data())
    problem = budget_problem(preparation, settings.candidates, settings.budget)
    if problem is None:
        return ()
    if not any(step.settings.returns_new_model for step in run.recipe.steps):
        raise ValueError(problem)
    return (f"quantize: the run measures the model that it has by then. As it is planned: {problem}",)


def _choice(prepared: PreparedQuantize, workspace: Workspace, data: Any) -> BitChoice | None:
    """Returns the bits of each weight for the step's budget or drop; None for a step that names the bits."""
    settings, options = prepared.settings, prepared.options
    if not settings.candidates:
        return None

    progress = workspace.step_progress("bits of weights: {}", end=_CHOSEN)
    own = (*_TRAINING_OPTIONS, *_OPTIONS_OF_ROUNDING)
    given = {name: getattr(options, name) for name in own if name != "bits"}
    shared = {"bits": settings.candidates, "progress": progress, "memory": settings.memory, **given}
    with workspace.run.replicas.scope(), workspace.noting():
        if settings.drop is None:
            return choose_bits(workspace.model, data, budget=settings.budget, **shared)
        return choose_bits(workspace.model, data, evaluate=_loss_of_metric(workspace), floor=-settings.drop, **shared)


def _loss_of_metric(workspace: Workspace) -> Callable[[Any], float]:
    """Returns a function that measures the change of the main metric on the validation data, above 0 = better."""
    known = workspace.run.data
    if known is not None and known.test is known.validation:
        workspace.note("quantize: the drop is measured on the test data, since no data are held out for validation.")
    metric, before = workspace.metrics[0], workspace.validate()

    def evaluate(_: Any) -> float:
        return -metric.drop(before[metric.name], workspace.validate()[metric.name])

    return evaluate


def _after_training(
    options: QuantizationOptions, workspace: Workspace, data: Any, progress: LayerProgress, memory: float
) -> QuantizationState:
    with workspace.run.replicas.scope(), workspace.noting():
        # The metrics of the model on integers are measured on the test data.
        baseline = Baseline(workspace.model, data, with_metrics=False)
        return quantize_model(workspace.model, options, data, progress, memory).with_damage(baseline)


def _in_training(
    settings: Any, options: QuantizationOptions, workspace: Workspace, data: Any, taught: Sequence[Any]
) -> tuple[QuantizationState, dict[str, list[float]]]:
    begin = settings.begin_epoch * (workspace.run.steps_per_epoch or 0)
    given = {name: getattr(options, name) for name in _TRAINING_OPTIONS}
    callback = QuantizationCallback(data, begin_step=begin, rate=settings.rate, **given)
    with workspace.holding_masks(), workspace.noting():
        history = workspace.fit(
            settings.epochs, settings.learning_rate, callback, *trained_clusters(workspace), *taught
        )
    return callback.report.state, history


def _arguments(settings: Quantize, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names} | {"bits": settings.fewest_bits}


def _options(settings: Quantize) -> QuantizationOptions:
    names = _TRAINING_OPTIONS
    if settings.epochs is None:
        return QuantizationOptions(**_arguments(settings, (*names, *_OPTIONS_OF_ROUNDING)))
    return training_options(_arguments(settings, names))  # type: ignore[arg-type]
