"""Defines the recipe field `data`: the source of the data, its split, and its preprocessing. Imports no Keras."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from prunekit.recipe.settings.fields import (
    Arguments,
    Count,
    Factory,
    FilePath,
    Listed,
    Plain,
    Positive,
    Settings,
    Sparsity,
    Text,
    path_example,
    refusal,
    resolved_path,
    shown,
    unknown,
)
from prunekit.suggestions import did_you_mean

KINDS = ("builtin", "idx", "npz", "npy", "images", "csv", "tfds_saved", "factory")
# Sources that can be one set of examples, from which validation and test examples are held out.
UNSPLIT = ("npz", "images", "csv", "tfds_saved")
# Fraction held out for validation if such a source has neither a validation nor a test part.
HELD_OUT = 0.2

# Layers that a recipe may name for `preprocessing` -> (required options, other options).
LAYERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "CategoryEncoding": (("num_tokens",), ("output_mode",)),
    "CenterCrop": (("height", "width"), ()),
    "Discretization": ((), ("num_bins", "bin_boundaries", "epsilon", "output_mode")),
    "IntegerLookup": ((), ("max_tokens", "num_oov_indices", "mask_token", "oov_token", "vocabulary", "output_mode")),
    "Normalization": ((), ("axis", "mean", "variance")),
    "Rescaling": (("scale",), ("offset",)),
    "Resizing": (
        ("height", "width"),
        ("interpolation", "crop_to_aspect_ratio", "pad_to_aspect_ratio", "fill_mode", "fill_value", "antialias"),
    ),
    "StringLookup": ((), ("max_tokens", "num_oov_indices", "mask_token", "oov_token", "vocabulary", "output_mode")),
    "TextVectorization": (
        (),
        ("max_tokens", "standardize", "split", "ngrams", "output_mode", "output_sequence_length", "vocabulary"),
    ),
}
TEXT_LAYERS = ("StringLookup", "TextVectorization")
_RANDOM = ("AugMix", "CutMix", "MixUp", "RandAugment")
_MOST_LAYERS = 20


_TARGETS = {f"{part}_targets": f"{part}_labels" for part in ("train", "validation", "test")}


class ArrayFiles(Settings):
    """Paths of four files with idx or npy arrays."""

    example: ClassVar[str] = "{train_inputs: ..., train_labels: ..., test_inputs: ..., test_labels: ...}"
    former: ClassVar[Mapping[str, str]] = _TARGETS
    train_inputs: FilePath
    train_labels: FilePath
    test_inputs: FilePath
    test_labels: FilePath


def _array_name(value: Any) -> Any:
    if isinstance(value, Mapping):
        wrong = [key for key, name in value.items() if not isinstance(key, str) or not isinstance(name, str) or not key]
        if not value or wrong:
            raise refusal(
                "expected the name of an array, or a mapping from names of inputs or outputs of the model to names of "
                f"arrays, such as {{image: x_image, size: x_size}}. Received: {shown(value)}."
            )
        return dict(value)
    if not isinstance(value, str):
        raise refusal(
            "expected the name of an array, such as x_train, or a mapping from names of inputs to names of arrays. "
            f"Received: {shown(value)}."
        )
    return value


ArrayName = Annotated[str | dict[str, str], BeforeValidator(_array_name)]


class NpzNames(Settings):
    """Names of the arrays inside an npz file; a mapping names several inputs or outputs.

    For a part without names, usual names are tried.
    """

    example: ClassVar[str] = "{train_inputs: x_train, train_labels: y_train}"
    former: ClassVar[Mapping[str, str]] = _TARGETS
    train_inputs: ArrayName | None = None
    train_labels: ArrayName | None = None
    validation_inputs: ArrayName | None = None
    validation_labels: ArrayName | None = None
    test_inputs: ArrayName | None = None
    test_labels: ArrayName | None = None


# Locked recipes of older versions have these names with every source.
_OLDER_ARRAYS = {
    "train_inputs": "x_train",
    "train_labels": "y_train",
    "test_inputs": "x_test",
    "test_labels": "y_test",
}


def _layer(value: Any, at: tuple[str | int, ...]) -> dict[str, dict[str, Any]]:
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise refusal(
            "expected the name of a Keras layer, or {NAME: {OPTION: value}}, such as Normalization or "
            f"{{Rescaling: {{scale: 0.00392}}}}. Received: {shown(value)}.",
            *at,
        )
    name, options = next(iter(value.items()))
    if not isinstance(name, str) or name not in LAYERS:
        raise _no_layer(name, at)
    return {name: _layer_options(name, {} if options is None else options, (*at, name))}


def _no_layer(name: Any, at: tuple[str | int, ...]) -> PydanticCustomError:
    if isinstance(name, str) and (name.startswith("Random") or name in _RANDOM):
        return refusal(
            f"preprocessing takes no random layers, whose random state a checkpoint cannot hold. Received: "
            f"{shown(name)}. Put the layer into the model: Keras applies it in training only, and its random state is "
            "restored.",
            *at,
        )
    return refusal(
        f"unknown preprocessing layer {shown(name)}.{did_you_mean(str(name), LAYERS)} Valid here: {', '.join(LAYERS)}.",
        *at,
    )


def _layer_options(name: str, options: Any, at: tuple[str | int, ...]) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise refusal(f"expected a mapping of the options of {name}. Received: {shown(options)}.", *at)
    required, others = LAYERS[name]
    for key in options:
        if key not in (*required, *others):
            raise unknown("key", key, (*required, *others), *at, key)
    for key in required:
        if key not in options:
            raise refusal(f"{name} needs the option {key!r}.", *at)
    if isinstance(options.get("vocabulary"), str):
        raise refusal("expected a list of words: a file is not read. Received: text.", *at, "vocabulary")
    return dict(options)


def _layers(value: Any, *at: str | int) -> list[dict[str, dict[str, Any]]]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not 0 < len(value) <= _MOST_LAYERS:
        raise refusal(
            f"expected a list of 1 to {_MOST_LAYERS} Keras layers, such as [Normalization]. Received: {shown(value)}.",
            *at,
        )
    return [_layer(item, (*at, i)) for i, item in enumerate(value)]


def _preprocessing(value: Any) -> Any:
    if isinstance(value, Mapping):
        if not value or any(not isinstance(key, str) for key in value):
            raise refusal(
                "expected a list of Keras layers, or for several inputs a mapping from their names to lists, such as "
                f"{{numbers: [Normalization]}}. Received: {shown(value)}."
            )
        return {key: _layers(item, key) for key, item in value.items()}
    return _layers(value)


def _columns(value: Any, *at: str | int) -> Any:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) and item for item in value):
        if len(set(value)) < len(value):
            raise refusal("expected each name once. Received: a name that occurs twice.", *at)
        return list(value)
    raise refusal(f"expected a name, or a list of names. Received: {shown(value)}.", *at)


def _inputs(value: Any) -> Any:
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        return {key: _columns([item] if isinstance(item, str) else item, key) for key, item in value.items()}
    if isinstance(value, Mapping):
        raise refusal(
            "expected a list of columns, or a mapping from names of the model's inputs to lists of columns, such as "
            f"{{numbers: [rooms, area], city: [town]}}. Received: {shown(value)}."
        )
    return _columns([value] if isinstance(value, str) else value)


def _test(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        return resolved_path(value, info)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
        return float(value)
    raise refusal(
        "expected a fraction of the examples in (0, 1), such as 0.2, or the path of the test part. "
        f"Received: {shown(value)}."
    )


def _optional(check: Callable[..., Any]) -> AfterValidator:
    return AfterValidator(lambda value: None if value is None else check(value))


ImageSize = Annotated[tuple[Annotated[int, Field(ge=1, le=16_384)], ...], Listed, Field(min_length=2, max_length=2)]


class DataSource(Settings):
    """Source of the data, and the part of the data that is used.

    Attributes:
        path: Folder of the idx files of the built-in data set "fashion-mnist".
        arrays: Names of the arrays of an npz file.
        images: Folder with one folder of images per class.
        size: Rows and columns that every image is resized to.
        color_mode: Channels of the images: 1, 3 or 4.
        interpolation: Interpolation of the resizing, as in Keras.
        crop_to_aspect_ratio: True cuts images to the ratio of `size` before the resizing, instead of distorting them.
        label_mode: Labels of images as class numbers, as one-hot rows, or for two classes as 0.0 and 1.0.
        csv: File with a header line.
        label: Columns of a CSV file that the model predicts; for `tfds_saved`, the key of the label in each element.
        inputs: Columns of a CSV file that the model reads, or input name -> columns. None: all other columns.
        delimiter: Character between the columns of a CSV file.
        tfds_saved: Folder that `tf.data.Dataset.save` wrote, or a folder of such folders: train, validation, test.
        shuffle_buffer: Number of examples of a saved data set among which the next one is drawn.
        validation: Fraction held out for validation, of all examples if `test` is a fraction, too.
        test: Fraction of the examples held out for the test, or the path of the test part (images, csv).
        limit: Maximum number of examples, for the training data and for the test data separately.
        scale: Divisor of the inputs. None: 255 for uint8 inputs, 1 for others.
        preprocessing: Keras layers applied to the inputs, in order; for several inputs, input name -> layers.
    """

    example: ClassVar[str] = "{builtin: digits}"
    former: ClassVar[Mapping[str, str]] = {"validation_split": "validation"}
    gone: ClassVar[Mapping[str, str]] = {"split": "validation: 0.2, and test: 0.2"}
    builtin: Literal["digits", "diabetes", "fashion-mnist"] | None = None
    path: FilePath | None = None
    idx: ArrayFiles | None = None
    npz: Annotated[FilePath | None, path_example("npz: arrays.npz", "a file", "arrays: {train_inputs: x}")] = None
    arrays: NpzNames = NpzNames()
    npy: ArrayFiles | None = None
    images: Annotated[FilePath | None, path_example("images: photos", "a folder", "size: [96, 96]")] = None
    size: ImageSize | None = None
    color_mode: Literal["rgb", "grayscale", "rgba"] | None = None
    interpolation: Literal["bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5"] | None = None
    crop_to_aspect_ratio: bool | None = None
    label_mode: Literal["int", "categorical", "binary"] | None = None
    csv: Annotated[FilePath | None, path_example("csv: houses.csv", "a file", "label: price")] = None
    label: Annotated[Plain, _optional(_columns)] = None
    inputs: Annotated[Plain, _optional(_inputs)] = None
    delimiter: Annotated[Text, Field(min_length=1, max_length=1)] | None = None
    tfds_saved: Annotated[FilePath | None, path_example("tfds_saved: folder", "a folder", "label: ...")] = None
    shuffle_buffer: Count | None = None
    factory: Factory | None = None
    arguments: Arguments = {}
    validation: Sparsity | None = None
    test: Annotated[Any, AfterValidator(lambda value, info: None if value is None else _test(value, info))] = None
    limit: Count | None = None
    scale: Positive | None = None
    preprocessing: Annotated[Plain, _optional(_preprocessing)] = None

    @model_validator(mode="before")
    @classmethod
    def _without_older_defaults(cls, value: Any) -> Any:
        """Leaves out what locked recipes of older versions have with every source."""
        if not isinstance(value, Mapping):
            return value
        older = {"validation_split": 0.0} | ({} if "npz" in value else {"arrays": _OLDER_ARRAYS})
        return {key: item for key, item in value.items() if key not in older or item != older[key]}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.exactly_one(*KINDS)
        self.only_with("factory", "arguments")
        self.only_with("npz", "arrays")
        self.only_with("builtin", "path")
        self.only_with("images", "size", "color_mode", "interpolation", "crop_to_aspect_ratio", "label_mode")
        self.only_with("csv", "delimiter")
        self.only_with("tfds_saved", "shuffle_buffer")
        for name in self.given("label", "inputs"):
            if self.csv is None and self.tfds_saved is None:
                raise refusal(f"{name!r} needs 'csv' or 'tfds_saved', which are missing here.", name)
        if self.builtin in ("digits", "diabetes") and self.path is not None:
            raise refusal(f"the {self.builtin} come with scikit-learn, not from a folder: leave out 'path'.", "path")
        if self.scale is not None and (self.builtin or self.factory):
            raise refusal("built-in data and a factory's data are scaled already: leave out 'scale'.", "scale")
        self._check_split()
        self._check_files()
        return self

    def _check_split(self) -> None:
        if self.test is None:
            return
        if self.kind not in UNSPLIT:
            raise refusal(f"data from {self.kind!r} have a test part already: leave out 'test'.", "test")
        if isinstance(self.test, str) and self.kind not in ("images", "csv"):
            raise refusal(f"expected a fraction such as 0.2: {self.kind!r} takes no path here.", "test")
        if isinstance(self.test, float) and self.test + (self.validation or 0) >= 1:
            raise refusal("'validation' and 'test' must leave examples for the training: together less than 1.", "test")

    def _check_files(self) -> None:
        if self.images is not None and self.size is None:
            raise refusal("'size' is missing: add for example size: [96, 96], rows and columns.", "images")
        if self.csv is not None and self.label is None:
            raise refusal("'label' is missing: name the column that the model predicts.", "csv")
        if self.tfds_saved is not None and isinstance(self.inputs, dict):
            raise refusal("expected a list of keys of the elements. Received: a mapping.", "inputs")
        if isinstance(self.inputs, dict):
            for key in self.preprocessing if isinstance(self.preprocessing, dict) else ():
                if key not in self.inputs:
                    raise unknown("key", key, self.inputs, "preprocessing", key)

    @property
    def kind(self) -> str:
        """Kind of the source: builtin, idx, npz, npy, images, csv, tfds_saved or factory."""
        return self.given(*KINDS)[0]
