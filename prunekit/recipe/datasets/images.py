"""Reads folders of images, one folder per class, through Keras's own utility; streamed, in any order."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.recipe.datasets.fingerprint import fingerprint, fingerprint_notes
from prunekit.recipe.datasets.parts import Arrays, IndexedPart, Opened, labels_of, require_tensorflow_for, subset_digest
from prunekit.recipe.settings.data_source import DataSource
from prunekit.recipe.text.loader import RecipeError

# Decoded and as float32, so many pixels in color take 1.2 GB.
MOST_PIXELS = 100_000_000
_CHANNELS = {"grayscale": 1, "rgb": 3, "rgba": 4}
# Names of folders with parts of the data, which are no classes.
_PARTS = {"train", "training", "val", "valid", "validation", "test"}


@dataclass(frozen=True)
class Decoding:
    """How an image file becomes an array.

    Attributes:
        size: Rows and columns.
        color_mode: "rgb", "grayscale" or "rgba".
        interpolation: Interpolation of the resizing.
        crop: True cuts images to the ratio of `size` first.
    """

    size: tuple[int, int]
    color_mode: str = "rgb"
    interpolation: str = "bilinear"
    crop: bool = False

    def image(self, path: Any) -> Any:
        """Returns the image in a file as `image_dataset_from_directory` gives it: float32, (rows, columns, channels).

        The values are 0 to 255.
        """
        import tensorflow as tf

        channels = _CHANNELS[self.color_mode]
        image = tf.image.decode_image(tf.io.read_file(path), channels=channels, expand_animations=False)
        if self.crop:
            image = _cropped(image, *self.size)
        image = tf.cast(tf.image.resize(image, self.size, method=self.interpolation), tf.float32)
        return tf.ensure_shape(image, (*self.size, channels))


def _cropped(image: Any, rows: int, columns: int) -> Any:
    """Returns the largest centred part of an image with the ratio rows : columns, as Keras's `smart_resize` cuts it."""
    import tensorflow as tf

    height, width = tf.shape(image)[0], tf.shape(image)[1]
    crop_height = tf.clip_by_value(tf.cast(tf.cast(width * rows, tf.float32) / columns, tf.int32), 1, height)
    crop_width = tf.clip_by_value(tf.cast(tf.cast(height * columns, tf.float32) / rows, tf.int32), 1, width)
    top = tf.cast(tf.cast(height - crop_height, tf.float32) / 2, tf.int32)
    left = tf.cast(tf.cast(width - crop_width, tf.float32) / 2, tf.int32)
    return image[top : top + crop_height, left : left + crop_width]


@dataclass(frozen=True, eq=False)
class ImagePart(IndexedPart):
    """Images in files, decoded when a batch is drawn.

    Attributes:
        paths: Path of each image.
        targets: Labels of shape (examples, ...).
        decoding: How a file becomes an array.
        digest: Fingerprint of all files of the folder.
        rows: Index of each example in the folder.
        prepare: Function of a batch of images; None leaves the images as they are.
    """

    paths: np.ndarray
    targets: np.ndarray
    decoding: Decoding
    digest: str
    rows: np.ndarray
    prepare: Callable[[Arrays], Arrays] | None = None

    @property
    def examples(self) -> int:  # type: ignore[override]
        """Number of examples."""
        return len(self.targets)

    def subset(self, indices: np.ndarray) -> "ImagePart":
        """Returns the images with these indices."""
        return replace(self, paths=self.paths[indices], targets=self.targets[indices], rows=self.rows[indices])

    def prepared(self, prepare: Callable[[Arrays], Arrays]) -> "ImagePart":
        """Returns the part with other inputs; `prepare` is called for each batch that is drawn."""
        return replace(self, prepare=prepare)

    def read(self, indices: Any, batch_size: int) -> Any:
        """Returns a `tf.data.Dataset` of batches from a dataset of example indices."""
        import tensorflow as tf

        paths, targets = tf.convert_to_tensor(self.paths), tf.convert_to_tensor(self.targets)

        def example(index: Any) -> tuple[Any, Any]:
            return self.decoding.image(tf.gather(paths, index)), tf.gather(targets, index)

        found = indices.map(example, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).batch(batch_size)
        prepare = self.prepare
        return found if prepare is None else found.map(lambda images, labels: (prepare(images), labels))

    def labels(self) -> Any:
        """Returns the `Labels` of the classes."""
        return labels_of(self.targets)

    def digests(self) -> list[str]:
        """Returns one digest of the files and of the examples that are used."""
        return [subset_digest(self.digest, self.rows)]

    def damaged(self) -> str | None:
        """Returns the first file of the part that cannot be decoded, or None."""
        import tensorflow as tf

        for path in self.paths:
            try:
                self.decoding.image(path)
            except tf.errors.OpError:
                return str(path)
        return None


def open_images(source: DataSource) -> Opened:
    """Returns the images of a folder, and of the folder `test` if the recipe names one.

    Raises:
        RecipeError: A folder is missing, has no classes or images, or an image is damaged or too large; or TensorFlow,
            which decodes images, is not installed.
    """
    require_tensorflow_for("data.images", "save the images as arrays in an .npz file (data.npz)")
    folder = Path(str(source.images))
    train, names = _folder(folder, source)
    test = None
    if isinstance(source.test, str):
        test, _ = _folder(Path(source.test), source, names)
    notes = []
    if source.scale is None and source.preprocessing is None:
        notes.append(
            "data: images are float32 numbers from 0 to 255, as Keras's image_dataset_from_directory gives them; "
            "scale: 255, preprocessing, or a Rescaling layer of the model changes this."
        )
    notes += fingerprint_notes(map(Path, train.paths))
    return Opened(folder.name, train, test=test, class_names=names, notes=tuple(notes))


def class_names(folder: Path) -> tuple[str, ...]:
    """Returns the names of the classes: the folders in `folder`, without hidden ones, as Keras's utility reads them."""
    return tuple(sorted(one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")))


def _folder(
    folder: Path, source: DataSource, names: tuple[str, ...] | None = None
) -> tuple[ImagePart, tuple[str, ...]]:
    if not folder.is_dir():
        raise RecipeError(f"the folder of images {folder} does not exist.")
    size = source.size or (0, 0)
    decoding = Decoding(
        (size[0], size[1]),
        source.color_mode or "rgb",
        source.interpolation or "bilinear",
        bool(source.crop_to_aspect_ratio),
    )
    try:
        found = keras.utils.image_dataset_from_directory(
            str(folder),
            class_names=None if names is None else list(names),
            batch_size=None,
            image_size=decoding.size,
            shuffle=False,
            verbose=False,
        )
    except ValueError as error:
        line = (str(error).strip() or "no images").splitlines()[0].rstrip(".")
        raise RecipeError(
            f"{folder} must hold one folder of images (.bmp, .gif, .jpeg, .jpg, .png) for each class"
            f"{'' if names is None else ', the same classes as the training images'}: {line}."
        ) from error
    classes = tuple(found.class_names)
    paths = sorted(found.file_paths)
    labels = np.array([classes.index(Path(path).relative_to(folder).parts[0]) for path in paths], "int64")
    if len(classes) > 1 and _PARTS.issuperset(name.lower() for name in classes):
        raise RecipeError(
            f"{folder} must hold one folder of images for each class. Received: folders with parts of the data, "
            f"{', '.join(classes)}. Name the training part as 'images', and another part as 'test'."
        )
    _check_images(paths, decoding)
    part = ImagePart(
        np.array(paths), _as_mode(labels, classes, source), decoding, _digest(paths, folder), np.arange(len(paths))
    )
    return part, classes


def _digest(paths: list[str], folder: Path) -> str:
    return fingerprint(map(Path, paths), folder)


def _as_mode(labels: np.ndarray, classes: tuple[str, ...], source: DataSource) -> np.ndarray:
    if source.label_mode == "categorical":
        return np.eye(len(classes), dtype="float32")[labels]
    if source.label_mode == "binary":
        if len(classes) != 2:
            raise RecipeError(f"label_mode: binary needs two classes. Received: {len(classes)}.")
        return labels.astype("float32")[:, np.newaxis]
    return labels


def _check_images(paths: list[str], decoding: Decoding) -> None:
    """Reads the header of every image, and decodes the first image of each kind.

    Raises:
        RecipeError: A file is no image, declares more pixels than `MOST_PIXELS`, or is of a kind that TensorFlow does
            not decode in this color mode.
    """
    seen = set()
    for path in paths:
        kind = _kind(path)
        if kind not in seen:
            seen.add(kind)
            _decode(path, decoding)


def _kind(path: str) -> tuple[str | None, str]:
    """Returns the format of an image, and its mode: the channels that Pillow gives it."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path) as image:
            pixels, kind, mode = image.width * image.height, image.format, image.mode
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise RecipeError(f"{path} is not an image that can be read: {line}. Repair or remove the file.") from error
    if kind not in ("BMP", "GIF", "JPEG", "MPO", "PNG"):
        raise RecipeError(f"{path} is not a BMP, GIF, JPEG or PNG image. Received: {kind}. Remove the file.")
    if pixels > MOST_PIXELS:
        raise RecipeError(
            f"{path} declares {pixels:,} pixels, more than {MOST_PIXELS:,}: make it smaller, or remove it."
        )
    return kind, mode


def _decode(path: str, decoding: Decoding) -> None:
    import tensorflow as tf

    try:
        decoding.image(path)
    except tf.errors.OpError as error:
        line = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", str(error)).strip().splitlines()[0].rstrip(".")
        raise RecipeError(
            f"{path} cannot be decoded with color_mode: {decoding.color_mode}: {line}. Choose another color_mode, or "
            "save this file and others of its kind as RGB images in PNG."
        ) from error
