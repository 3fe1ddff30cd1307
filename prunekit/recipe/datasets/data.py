"""Loads the data of a run: opens the source, splits it by seed, and prepares the inputs for the model."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from prunekit.recipe.datasets.arrays import (
    existing,
    from_pairs,
    has_all_inputs,
    has_labels,
    open_arrays,
    open_inputs,
    opened,
)
from prunekit.recipe.datasets.builtin import open_builtin
from prunekit.recipe.datasets.builtin_files import fashion_files
from prunekit.recipe.datasets.csv_files import open_csv
from prunekit.recipe.datasets.images import open_images
from prunekit.recipe.datasets.parts import ArrayPart, Labels, Opened, Part, as_part, mapped, naming_damaged_file
from prunekit.recipe.datasets.preprocessing import preparation
from prunekit.recipe.datasets.saved import open_saved
from prunekit.recipe.settings.data_source import HELD_OUT, UNSPLIT, DataSource
from prunekit.recipe.text.loader import RecipeError
from prunekit.recipe.text.presence import data_files, exists

# Kind of source -> function that opens it.
_OPEN: dict[str, Callable[[DataSource], Opened]] = {
    "builtin": open_builtin,
    "idx": open_arrays,
    "npz": open_arrays,
    "npy": open_arrays,
    "factory": open_arrays,
    "images": open_images,
    "csv": open_csv,
    "tfds_saved": open_saved,
}
# Number of classes that are listed by name.
_LISTED = 20


@dataclass(frozen=True, eq=False)
class Data:
    """Training, validation and test data of a run; a pair (inputs, labels) of arrays is made a `Part`.

    Attributes:
        name: Readable name, such as "digits".
        train: Training examples.
        validation: Examples held out of the training part; the test part if nothing is held out.
        test: Examples for the accuracy of the run; the validation part if there are no others.
        class_names: Names of the classes, in the order of their numbers; empty without names.
        notes: Facts about reading, split and preprocessing for the plan and the report.
    """

    name: str
    train: Any
    validation: Any
    test: Any
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            object.__setattr__(self, name, as_part(getattr(self, name)))

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by name: "training", "validation" and "test"."""
        return {"training": self.train, "validation": self.validation, "test": self.test}

    @property
    def digest(self) -> str:
        """Returns the SHA-256 over all parts: arrays as prepared for the model; files, and the examples used."""
        total = hashlib.sha256()
        for part in self.parts.values():
            for digest in part.digests():
                total.update(digest.encode())
        return total.hexdigest()


@dataclass(frozen=True)
class DataSummary:
    """What a plan says of the data.

    Attributes:
        name: Readable name of the data.
        examples: Part -> number of examples.
        inputs: Input name ("" for a single input) -> shape of one example and type, such as "8 x 8 x 1 float32".
        labels: Output name ("" for a single output) -> shape, type and range.
        class_names: Names of the classes, in the order of their numbers; empty without names.
        streamed: True if examples are read from files while the model trains.
        notes: Facts about reading, split and preprocessing.
    """

    name: str
    examples: dict[str, int]
    inputs: dict[str, str]
    labels: dict[str, str]
    class_names: tuple[str, ...] = ()
    streamed: bool = False
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-compatible values."""
        return asdict(self)


def check_files(source: DataSource) -> None:
    """Checks that the data's files exist, without reading them.

    Raises:
        RecipeError: A file is missing.
    """
    if source.builtin == "fashion-mnist":
        fashion_files(source.path)
    for _, path, kind in data_files(source):
        if not exists(path, kind):
            raise RecipeError(f"the data {kind} {path} does not exist.")


def load_data(source: DataSource, seed: int) -> Data:
    """Loads the data that a recipe names.

    Args:
        source: Data settings of the recipe.
        seed: Seed of the recipe: selects the examples that `limit` keeps and the examples held out.

    Raises:
        RecipeError: A file is missing or damaged, or the data do not fit together.
    """
    found, notes = _split(_OPEN[source.kind](source), source, seed)
    return _prepared(found, source, notes)


def training_examples(source: DataSource, count: int, inputs: Sequence[str]) -> Any:
    """Returns training examples as calibration data, drawn at random with seed 0; nothing is held out.

    They are (inputs, labels), or inputs alone from an .npz file that has no labels.

    Args:
        source: An .npz file or a saved data set.
        count: How many examples; all if there are fewer.
        inputs: Names of the model's inputs, under which an .npz file may hold them.

    Raises:
        RecipeError: A file is missing or damaged.
    """
    file = unlabelled_file(source, inputs)
    found = _OPEN[source.kind](source) if file is None else open_inputs(file, inputs)
    train = _prepared(replace(found, validation=found.train, test=found.train), source, ()).train
    data = drawn_examples(train, count, seed=0)
    return data if file is None else data[0]


def unlabelled_file(source: DataSource, inputs: Sequence[str]) -> Path | None:
    """Returns the .npz file of a source that has inputs alone, without labels; None for all other data.

    Args:
        source: Data settings.
        inputs: Names of the model's inputs, under which the file may hold them.

    Raises:
        RecipeError: The file is missing or damaged.
    """
    if source.npz is None or source.arrays.train_labels is not None:
        return None
    file = existing(source.npz)
    return file if has_all_inputs(file, inputs) or not has_labels(file) else None


def measured_data(source: DataSource) -> tuple[Data, str]:
    """Returns data whose test part is what a model is measured on, and its name.

    It is the test part; the validation part of data without one; and all examples of undivided data.

    Raises:
        RecipeError: A file is missing or damaged.
    """
    found = _OPEN[source.kind](source)
    named = {"test part": found.test, "validation part": found.validation, "all examples": found.train}
    name, part = next((name, part) for name, part in named.items() if part is not None)
    return _prepared(replace(found, validation=part, test=part), source, ()), name


def drawn_examples(part: Part, count: int, seed: int) -> Any:
    """Returns some examples of a part as calibration data, drawn at random, in their order; all if there are fewer."""
    drawn = np.random.default_rng(seed).choice(part.examples, min(count, part.examples), replace=False)
    return part.subset(np.sort(drawn)).calibration_data()


def given_data(pairs: Any) -> Data:
    """Returns data given in Python, ((train inputs, labels), (test inputs, labels)), without changes.

    All examples are used, without scaling, and the test part also serves for validation.

    Raises:
        RecipeError: `pairs` has a different structure, or its arrays do not fit together.
    """
    found = opened("the given data", from_pairs(pairs, "`data`"))
    train, test = _scaled(found.train, None), _scaled(found.test, None)
    return Data(name="given in Python", train=train, validation=test, test=test)


def first_examples(part: Any, count: int) -> tuple[Any, Any]:
    """Returns inputs and labels of the first `count` examples of a part of the data, as arrays or arrays by name."""
    return as_part(part).first(count)


def summary(data: Data) -> DataSummary:
    """Returns what a plan says of the data."""
    inputs, _ = data.train.example
    test = {} if data.test is data.validation else {"test": data.test.examples}
    examples = {"training": data.train.examples, "validation": data.validation.examples} | test
    return DataSummary(
        name=data.name,
        examples=examples,
        inputs=_by_name(mapped(lambda array: _shape_text(array.shape[1:], array.dtype.name), inputs)),
        labels=_by_name(mapped(_label_text, data.train.labels())),
        class_names=data.class_names,
        streamed=not isinstance(data.train, ArrayPart),
        notes=data.notes,
    )


def _by_name(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {"": found}


def _shape_text(shape: tuple[int, ...], kind: str) -> str:
    return f"{' x '.join(map(str, shape))} {kind}".strip()


def _label_text(label: Labels) -> str:
    values = f"{label.low:g} to {label.high:g}"
    return f"{_shape_text(label.shape, label.dtype)}, {values}"


# ---- splitting and preparing -----------------------------------------------------------------------------------------


def _split(found: Opened, source: DataSource, seed: int) -> tuple[Opened, tuple[str, ...]]:
    """Returns the source with a validation and a test part, and the notes about them."""
    random = np.random.default_rng(seed)
    # In this order, which the random numbers of older runs had.
    train = _limited(found.train, source.limit, random)
    test = found.test if found.test is None else _limited(found.test, source.limit, random)
    fraction, for_test = source.validation or 0.0, source.test if isinstance(source.test, float) else 0.0
    if for_test and test is not None:
        raise RecipeError(f"{found.name} has a test part already: leave out data.test.")
    if found.validation is not None and fraction:
        raise RecipeError(f"{found.name} has a validation part already: leave out data.validation.")
    notes = list(found.notes)
    unsaid = not fraction and not for_test and test is None and found.validation is None
    fraction = HELD_OUT if unsaid else fraction
    train, held_out, tested = _held_out(train, fraction, for_test, random)
    validation, test = found.validation or held_out, test or tested
    if source.kind in UNSPLIT and (held_out is not None or tested is not None):
        notes.append(_split_note(train, held_out, tested, seed, unsaid))
    if test is None:
        notes.append("data: there is no test part, so the metrics are measured on the validation part.")
    if found.class_names:
        notes.append(f"data: classes {_classes(found.class_names)}.")
    return replace(found, train=train, validation=validation or test, test=test or validation), tuple(notes)


def _split_note(train: Part, held_out: Part | None, tested: Part | None, seed: int, unsaid: bool) -> str:
    named = (("for validation", held_out), ("for the test", tested))
    counts = [f"{part.examples:,} {name}" for name, part in named if part is not None]
    counts[0] = counts[0].replace(" for", " are held out for", 1)
    total = sum(part.examples for part in (train, held_out, tested) if part is not None)
    reason = "the data have one part: " if unsaid else ""
    return f"data: {reason}of {total:,} examples, {' and '.join(counts)}, by seed {seed}."


def _classes(names: tuple[str, ...]) -> str:
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(names[:_LISTED]))
    return listed + (f" and {len(names) - _LISTED:,} others" if len(names) > _LISTED else "")


def _limited(part: Part, limit: int | None, random: np.random.Generator) -> Part:
    if limit is None or limit >= part.examples:
        return part
    # Select at random, because files may be sorted by class; keep the original order.
    return part.subset(np.sort(random.permutation(part.examples)[:limit]))


def _held_out(
    part: Part, validation: float, test: float, random: np.random.Generator
) -> tuple[Part, Part | None, Part | None]:
    if not validation and not test:
        return part, None, None
    count = part.examples
    tested, held_out = round(test * count), round(validation * count)
    if (validation and not held_out) or (test and not tested) or held_out + tested >= count:
        fractions = f"{validation:g}" + (f" and {test:g}" if test else "")
        raise RecipeError(
            f"validation and test must leave examples in {'both' if not test else 'all'} parts. Received: {fractions} "
            f"of {count:,} examples."
        )
    order = random.permutation(count)
    end = count - tested
    train, middle, last = np.sort(order[: end - held_out]), np.sort(order[end - held_out : end]), np.sort(order[end:])
    return part.subset(train), part.subset(middle) if held_out else None, part.subset(last) if tested else None


def _prepared(found: Opened, source: DataSource, notes: tuple[str, ...]) -> Data:
    parts = (found.train, found.validation, found.test)
    notes_of_layers: tuple[str, ...] = ()
    prepare: Callable[[Any], Part]
    if source.preprocessing is None and all(isinstance(part, ArrayPart) for part in parts):
        prepare = partial(_scaled, scale=source.scale, whole_bytes=source.factory is None)
    else:
        with naming_damaged_file([found.train]):
            function, notes_of_layers = preparation(source, found.train)
        prepare = methodcaller("prepared", function)
    done = {id(part): prepare(part) for part in {id(part): part for part in parts}.values()}
    train, validation, test = (done[id(part)] for part in parts)
    notes = (*notes, *notes_of_layers, *_constant_labels(train))
    return Data(found.name, train, validation, test, class_names=found.class_names, notes=notes)


def _constant_labels(train: Part) -> list[str]:
    """Returns a note for each label that is the same for all training examples."""
    return [
        f"data: all training labels{f' {name!r}' if name else ''} are {label.low:g}: no training learns from them."
        for name, label in _by_name(train.labels()).items()
        if label.low == label.high and train.examples > 1
    ]


def _scaled(part: Any, scale: float | None, whole_bytes: bool = False) -> ArrayPart:
    """Returns the part with inputs divided by `scale`; None divides bytes by 255 if `whole_bytes` is True."""

    def divided(array: np.ndarray) -> np.ndarray:
        divisor = 255.0 if scale is None and whole_bytes and array.dtype == np.uint8 else scale
        if divisor is not None:
            array = np.divide(array, np.float32(divisor), dtype="float32")
        elif array.dtype.kind in "fb":
            array = array.astype("float32", copy=False)
        return np.ascontiguousarray(array)

    return ArrayPart(mapped(divided, part.inputs), mapped(np.ascontiguousarray, part.targets))
