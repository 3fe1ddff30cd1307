"""search: the smallest or fastest file for a drop that the user names, or the best one within bounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.data.calibration import CheckedData
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.runtime.partial_files import checked_folder, replace_file, replace_json, replace_model
from prunekit.core.runtime.ray_tasks import load_ray
from prunekit.delivery.litert.model_measures import check_measure
from prunekit.delivery.plots.files_plot import files_figure
from prunekit.delivery.plots.plots import to_png
from prunekit.operations.search_training import MixtureTraining, forget_trained
from prunekit.searching.building import FORMS
from prunekit.searching.costs import TECHNIQUES
from prunekit.searching.judge import SearchData
from prunekit.searching.search_report import SearchReport
from prunekit.searching.search_run import FILES, TABLES, SearchRun
from prunekit.searching.shared_scan import PURPOSE
from prunekit.searching.time_limit import NO_LIMIT, TimeLimit
from prunekit.sparsity.arguments import (
    MEMORY,
    check_functions,
    duration,
    non_negative,
    number_of_bytes,
    one_of,
    time_or_share,
    whole,
)
from prunekit.sparsity.shorthands import SearchProfile, SearchTarget, SearchTechnique, SearchWorkers
from prunekit.suggestions import did_you_mean
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats

REPORT, MODEL, FILE, PACKED = "search.json", "model.keras", "model.tflite", "model.pack"
PICTURE = "search.png"


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What a search delivers.

    Attributes:
        model: The Keras model whose integer file was judged; its weights lie on their grids.
        report: How the file was found.
        file: The LiteRT file.
        packed: The packed file; b"" unless target="packed".
    """

    model: Any
    report: SearchReport
    file: bytes
    packed: bytes

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes the model (model.keras), its files (model.tflite, model.pack) and the report (search.json, .png)."""
        path = checked_folder(folder, "search", (REPORT, PICTURE, MODEL, FILE, PACKED))
        path.mkdir(parents=True, exist_ok=True)
        replace_model(path / MODEL, self.model)
        replace_file(path / FILE, self.file)
        if self.packed:
            replace_file(path / PACKED, self.packed)
        else:
            # Of another question.
            (path / PACKED).unlink(missing_ok=True)
        replace_file(path / PICTURE, to_png(files_figure(self.report.picture.data)))
        replace_json(path / REPORT, self.report.to_dict())
        return path


def search(  # noqa: PLR0913
    model: Any,
    data: Any,
    *,
    drop: float | None = None,
    bytes: float | str | None = None,
    latency: float | str | None = None,
    arena: float | str | None = None,
    profile: SearchProfile = "small",
    target: SearchTarget = "litert",
    techniques: Literal["all"] | Sequence[SearchTechnique] | SearchTechnique = "all",
    training: Mapping[str, Any] | Callable[[Any, list[Any]], Any] | None = None,
    output: str | os.PathLike[str] | None = None,
    seed: int = 0,
    memory: float | str = MEMORY,
    workers: SearchWorkers | None = None,
    time: float | str | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Returns the smallest or fastest integer file of a model that loses at most a drop, or the best one within bounds.

    Each layer's rank, bits and zeros, and the channels that are kept, are chosen together. Every level is measured by
    itself on examples, with the layers behind it repaired; an exact program chooses one for each; the file of the
    choice is made, run, and measured on other examples, and the choice is made again, stricter or bolder, for up to
    nine bounds of the error, then up to six times for some of the techniques. The file that is returned held the drop
    on held-out examples, which accept or reject each file. The model is not changed.

    Args:
        model: A built Sequential or functional Keras model.
        data: A pair (inputs, labels), a dataset or a list of such batches; some thousands of examples that the model
            was not trained on. Inputs alone: the drop is one of agreement with the model.
        drop: By how much the metric may become worse, in its own unit: 0.005 = half a point of accuracy. The metric is
            the first metric of Keras that the model is compiled with, else the accuracy for labels that are classes,
            else the loss. None: the least drop within the other bounds.
        bytes: Most bytes of the file, such as "200kB".
        latency: Most time of a call on this machine, one thread: "2ms", or a share of that of the model's float32
            LiteRT file: 0.5.
        arena: Most memory for the activations of one example, such as "64kB", as LiteRT for Microcontrollers plans it;
            its kernels' own buffers come on top.
        profile: What is minimised within the drop: "small": bytes; "fast": latency; "balanced": the sum of both, as
            shares of those of the model without removals and zeros.
        target: "litert": bytes of the LiteRT file. "packed": bytes of its packed form (`pk.pack`), which is what apps
            download: there zeros count, too. "microcontroller": bytes of a LiteRT file in which everything is integers,
            inputs and outputs too.
        techniques: What may be chosen: "shrink" (channels), "factorize" (low rank), "quantize" (fewer than 8 bits),
            "prune" (zeros, in packed files alone); "all", or some of them.
        training: Up to five choices with a larger error, and four of fewer techniques, are trained, with their zeros
            and bits, and with the model as their teacher: {"epochs": 3}, with "data" (labelled examples; else those of
            `data` that neither choose nor judge), "learning_rate" (0.001, falls to 0 by half a cosine) and "batch_size"
            (32); the loss is the one that the model is compiled with. Or a function of a model and of callbacks, which
            compiles the model and calls its `fit` with them. None trains nothing.
        output: Folder for model.keras, model.tflite, model.pack, the report (search.json, search.png), the table of all
            levels (scan-TARGET.json) and what is known of files (files-TARGET.json). A search that was interrupted
            there is continued, with the trainings that had ended (those of a function are made again), and another
            question on the same model and data begins with the table, another drop with the files, too.
        seed: Seed of the draw of the examples for each purpose.
        memory: Largest number of bytes of activations that are kept; less memory costs time. Where the activations of
            a model for 256 examples are larger, the layers behind a change are fitted to fewer of them.
        workers: "ray": the nodes of a Ray cluster (that of RAY_ADDRESS or of this machine, one processor for each part)
            measure the levels, in up to 16 parts, each with `memory`; results are the same up to rounding. Files are
            made here. None = this process.
        time: Most time of the search: "20min", "2h", or seconds. Half of it is for the table; the weights and groups
            that it lacks, the smallest ones, have 8 bits and all channels. No file is begun for which there is no time,
            unless none answers yet, and a training that would end later is given up after its first seconds. With
            `output`, another call measures what is missing.
        progress: Told of each scanned weight, each file and each epoch of a training: (done, total, text).

    Raises:
        ImportError: `workers` needs Ray, which is not installed.
        ValueError: No bound is given; no file meets them: the message has what is reachable; there are fewer than 128
            examples; the model has a `call` of its own; this machine makes no LiteRT files.
        TypeError: `model` is not a Keras 3 model.
    """
    check_functions(progress=progress)
    limit = NO_LIMIT if time is None else TimeLimit.after(duration("time", time))
    if drop is None and bytes is None and latency is None and arena is None:
        raise ValueError(
            "A search needs a question: drop=0.005, bytes='200kB', latency='2ms', arena='64kB'. Received: none of them."
        )
    one_of("target", target, get_args(SearchTarget))
    one_of("profile", profile, get_args(SearchProfile))
    if drop is None and profile != "small":
        raise ValueError(
            f"`profile` is what is minimised within a drop; without one, the drop itself is. Received: {profile=} and "
            "no drop."
        )
    allowed = _techniques(techniques)
    if workers is not None:
        one_of("workers", workers, get_args(SearchWorkers))
        load_ray(PURPOSE)
    if target != "packed" and set(allowed) == {"prune"}:
        raise ValueError(
            "Zeros take as many bytes as other weights in a LiteRT file. Received: techniques='prune' and "
            f"{target=}. Pass target='packed', or other techniques."
        )
    most_drop = None if drop is None else non_negative("drop", drop)
    most_bytes = None if bytes is None else int(number_of_bytes("bytes", bytes))
    most_arena = None if arena is None else int(number_of_bytes("arena", arena))
    most_time = None if latency is None else time_or_share("latency", latency)
    check_measure("bytes")
    check_built(model)
    check_computes_in_floats(model)
    folder = None
    if output is not None:
        folder = checked_folder(
            output, "search", (*TABLES.values(), *FILES.values(), REPORT, PICTURE, MODEL, FILE, PACKED)
        )
    teacher = None if training is None else MixtureTraining(model, training, folder)
    checked = CheckedData(model, data)
    next(iter(checked))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    examples = SearchData(data, whole("seed", seed, 0), everything=teacher is not None and teacher.needs_examples)
    train = None
    if teacher is not None:
        train = teacher.of(examples, full_integer=FORMS[target].full_integer, progress=progress, limit=limit)
    kept_bytes = number_of_bytes("memory", memory)
    work = SearchRun(
        model, examples, target, allowed, kept_bytes, progress, workers=workers, limit=limit, folder=folder
    )
    question = work.question(most_drop, most_bytes, most_time, profile, most_arena)
    work.scan(question)
    made, report = work.answer(question, train)
    result = SearchResult(made.model, report, made.file, made.packed)
    if folder is not None:
        result.save(folder)
        forget_trained(folder)
    return result


def _techniques(given: Any) -> tuple[str, ...]:
    several = isinstance(given, Iterable) and not isinstance(given, str)
    listed = TECHNIQUES if given == "all" else tuple(given) if several else (given,)
    wrong = [one for one in listed if one not in TECHNIQUES]
    if wrong or not listed:
        raise ValueError(
            f'`techniques` is "all", or some of {", ".join(TECHNIQUES)}. Received: {given!r}.'
            f"{did_you_mean(str(wrong[0]), TECHNIQUES) if wrong else ''}"
        )
    return listed
