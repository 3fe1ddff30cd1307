"""The handler of the step kind search."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunekit.core.runtime.partial_files import replace_file
from prunekit.delivery.litert.model_measures import check_measure
from prunekit.operations.quantize import outputs_of
from prunekit.operations.search_training import MixtureTraining, forget_trained
from prunekit.recipe.datasets.batches import AdvancingOrder
from prunekit.recipe.datasets.data import Data
from prunekit.recipe.datasets.parts import Part, as_part
from prunekit.recipe.settings.search_settings import Search
from prunekit.recipe.state.compile_settings import optimizer_from
from prunekit.recipe.state.export_samples import export_samples, metrics_on_samples
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.integer_files import metrics_before, metrics_sections, written_integers
from prunekit.recipe.steps.step_handler import PreparedStep, StepHandler, StepResult, require_backend
from prunekit.searching.building import FORMS, Built
from prunekit.searching.costs import TECHNIQUES
from prunekit.searching.judge import LEAST, READ, SearchData
from prunekit.searching.search_report import SearchReport
from prunekit.searching.search_run import TABLES, SearchRun
from prunekit.sparsity.arguments import time_or_share
from prunekit.techniques.shrink.channels.optimizer_state import compile_like

_UNSEEN = "search: the drop is measured on training examples, since no data are held out for validation."


@dataclass(frozen=True, eq=False)
class PreparedSearch(PreparedStep):
    """A search, with the part of the data that it reads.

    Attributes:
        has_held_out: True if this is the validation data; False for training data.
    """

    has_held_out: bool = True


class SearchStep(StepHandler[PreparedSearch]):
    """Chooses channels, ranks, bits and zeros together, and writes the integer file."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedSearch:
        """Returns the step.

        Raises:
            ValueError: There are no data, or too few.
            RecipeError: Keras runs on a backend without LiteRT files.
        """
        require_backend(("tensorflow",), "the step search, which writes a LiteRT file,")
        check_measure("bytes")
        if run.data is None or not run.metrics:
            raise ValueError("a search measures the drop on data. Received: a recipe without data or compile settings.")
        part, has_held_out = _examples(run.data)
        if part.examples < LEAST:
            raise ValueError(f"a search needs {LEAST} examples, better some thousands. Received: {part.examples}.")
        return PreparedSearch(settings, has_held_out=has_held_out)

    def plan_notes(self, prepared: PreparedSearch) -> Sequence[str]:
        """Returns that the plan does not know what will be chosen, and that nothing is held out."""
        unknown = "search: channels, ranks, bits and zeros follow from measurements of the model as it is then."
        return (unknown,) if prepared.has_held_out else (unknown, _UNSEEN)

    def run(self, prepared: PreparedSearch, workspace: Workspace) -> StepResult:
        """Searches, goes on with the model that was found, and writes and measures its file."""
        workspace.remember_before()
        settings, run, state = prepared.settings, workspace.run, workspace.state
        samples, labels = export_samples(workspace.model, run.data, run.recipe.seed)
        before, floats = metrics_before(workspace, samples), outputs_of(workspace.model, samples)
        built, report = _searched(settings, workspace)
        found = built.state
        workspace.replace_model(found.model)
        with found.simulating():
            simulated = workspace.evaluate()
            on_samples = metrics_on_samples(run, workspace.model, samples, simulated)
        workspace.report_progress(0.95, "writing the integer file")
        file, form = f"{settings.name}.tflite", FORMS[settings.target]
        row, sections, text = written_integers(found, samples, floats, workspace, labels, file, form.integer_io)
        if built.packed and row.status == "ok":
            replace_file(workspace.exports / f"{settings.name}.tflite.pack", built.packed)
            row = replace(row, packed_bytes=len(built.packed))
        state.exports.append(row)
        forget_trained(workspace.kept)
        return StepResult(
            model=workspace.model,
            metrics=simulated,
            sections=[*metrics_sections(before, on_samples, row), *report.sections(), *sections],
            text=f"{report.verdict()} {text}",
        )


def _searched(settings: Search, workspace: Workspace) -> tuple[Built, SearchReport]:
    """Returns the file that was found, with its report."""
    run = workspace.run
    if run.data is None:
        raise ValueError("A search reads data.")
    part, has_held_out = _examples(run.data)
    if not has_held_out:
        workspace.note(_UNSEEN)
    count = min(part.examples, READ)
    drawn = np.sort(np.random.default_rng(run.recipe.seed).permutation(part.examples)[:count])
    trains = settings.training is not None
    examples = SearchData(part.subset(drawn).first(count), run.recipe.seed, everything=trains and not has_held_out)
    progress = workspace.step_progress("{}", 0.0, 0.9)
    with workspace.noting():
        techniques = settings.techniques or TECHNIQUES
        metric = workspace.metrics[0]
        folder, table = workspace.kept, TABLES[settings.target]
        folder.mkdir(parents=True, exist_ok=True)
        work = SearchRun(
            workspace.model, examples, settings.target, techniques, settings.memory, progress, metric, folder=folder
        )
        time = None if settings.latency is None else time_or_share("latency", settings.latency)
        question = work.question(settings.drop, settings.bytes, time, settings.profile, settings.arena)
        work.scan(question)
        workspace.exports.mkdir(parents=True, exist_ok=True)
        replace_file(workspace.exports / table, (folder / table).read_bytes())
        if settings.training is None:
            return work.answer(question)
        # Examples that choose and judge are not trained on.
        fit = _Fit(settings, workspace, run.data.train if has_held_out else as_part(examples.trained))
        training = MixtureTraining(workspace.model, fit, folder, identity=settings.model_dump(mode="json"))
        train = training.of(examples, full_integer=FORMS[settings.target].full_integer, progress=progress)
        return work.answer(question, train)


class _Fit:
    """Trains a model on a part of the data, with the recipe's optimizer."""

    def __init__(self, settings: Search, workspace: Workspace, part: Part):
        self._settings, self._workspace, self._part = settings, workspace, part

    def __call__(self, model: Any, callbacks: list[Any]) -> None:
        run, given = self._workspace.run, self._settings.training
        if run.compile is None or given is None:
            raise ValueError("A training needs compile settings.")
        optimizer = optimizer_from(run.compile)
        if given.learning_rate is not None:
            optimizer.learning_rate = given.learning_rate
        compile_like(self._workspace.model, model, optimizer)
        order = AdvancingOrder(self._part.examples, self._workspace.step.seed)
        batches = self._part.training_batches(order, run.compile.batch_size)
        model.fit(batches, epochs=given.epochs, callbacks=callbacks, shuffle=False, verbose=0)


def _examples(data: Data) -> tuple[Any, bool]:
    """Returns the examples that choose and judge, and whether they are held out; the test data only report."""
    held_out = data.validation is not data.test
    return (data.validation if held_out else data.train), held_out
