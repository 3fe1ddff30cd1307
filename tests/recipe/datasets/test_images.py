import io
import shutil
import struct
import zlib
from pathlib import Path

import keras
import numpy as np
import pytest
from data_folders import classifier, recipe, write_images
from PIL import Image

from prunekit.recipe.datasets import fingerprint as fingerprints
from prunekit.recipe.datasets.data import load_data
from prunekit.recipe.run.plan import plan
from prunekit.recipe.settings.schema import DataSource
from prunekit.recipe.text.loader import RecipeError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "images", each=5)


@pytest.fixture
def copied(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "images"))


def loaded(folder, seed=3, **options):
    return load_data(DataSource.model_validate({"images": str(folder), "size": [8, 6], **options}), seed)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"crop_to_aspect_ratio": True, "interpolation": "nearest"},
        {"color_mode": "grayscale", "label_mode": "categorical"},
    ],
    ids=["default", "cropped", "grayscale and one-hot"],
)
def test_images_are_those_of_keras_pixel_for_pixel(folder, options):
    found = loaded(folder, **options)
    kept = {"label_mode": "int", **options}
    theirs = keras.utils.image_dataset_from_directory(
        str(folder), batch_size=None, image_size=(8, 6), shuffle=False, verbose=False, **kept
    )
    images, labels = (np.stack([item.numpy() for item in part]) for part in zip(*theirs, strict=True))
    for part in (found.train, found.validation):
        mine = part.first(part.examples)
        np.testing.assert_array_equal(mine[0], images[part.rows])
        np.testing.assert_array_equal(mine[1], labels[part.rows])
    assert found.class_names == ("cat", "dog", "fox")


def test_the_split_is_by_the_seed_and_leaves_no_example_out(folder):
    found, again, other = loaded(folder, validation=0.4), loaded(folder, validation=0.4), loaded(folder, 4)
    rows = [*found.train.rows, *found.validation.rows]
    assert sorted(rows) == list(range(15)) and found.validation.examples == 6
    assert found.digest == again.digest != other.digest
    assert found.test is found.validation


def test_a_test_folder_needs_the_same_classes(folder, copied):
    found = loaded(folder, test=str(copied))
    assert found.test.examples == 15 and found.validation is found.test and found.train.examples == 15
    shutil.rmtree(copied / "fox")
    with pytest.raises(RecipeError, match="the same classes as the training images"):
        loaded(folder, test=str(copied))


def test_two_classes_may_be_one_number(folder, copied):
    with pytest.raises(RecipeError, match="binary needs two classes. Received: 3"):
        loaded(folder, label_mode="binary")
    shutil.rmtree(copied / "fox")
    labels = loaded(copied, label_mode="binary").train.labels()
    assert (labels.shape, labels.dtype, labels.low, labels.high) == ((1,), "float32", 0.0, 1.0)


def test_the_fingerprint_is_of_names_and_contents_and_not_of_the_place(folder, copied, monkeypatch):
    before = loaded(folder).digest
    assert loaded(copied).digest == before
    (copied / "cat" / "00.jpg").rename(copied / "cat" / "99.jpg")
    assert loaded(copied).digest != before
    (copied / "cat" / "99.jpg").rename(copied / "cat" / "00.jpg")
    monkeypatch.setattr(fingerprints, "READ_WHOLE", 0)
    found = loaded(copied)
    assert "4 KiB of each file" in " ".join(found.notes)
    content = bytearray((copied / "cat" / "00.jpg").read_bytes())
    content[-3] ^= 1
    (copied / "cat" / "00.jpg").write_bytes(content)
    assert loaded(copied).digest != found.digest


def png_of(rows, columns):
    """A PNG file that declares so many pixels and holds none."""
    head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def tiff():
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, "tiff")
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not an image"),
        (b"text, not an image", "not an image"),
        (png_of(60_000, 60_000), "bomb"),
        (png_of(10_001, 10_000), "declares 100,010,000 pixels, more than 100,000,000"),
        (tiff(), "Received: TIFF"),
    ],
    ids=["empty", "text", "far too large", "too large", "another kind"],
)
def test_files_that_are_no_images_are_refused_before_anything_trains(copied, content, match):
    (copied / "dog" / "extra.png").write_bytes(content)
    with pytest.raises(RecipeError, match=rf"dog/extra\.png .*{match}"):
        loaded(copied)


@pytest.mark.parametrize(
    ("kind", "mode", "color_mode", "match"),
    [
        ("jpeg", "RGB", "rgba", "JPEG does not support 4 channels"),
        ("gif", "P", "grayscale", "channels must be 0 or 3 for GIF, got 1"),
        ("bmp", "1", "rgb", "Number of channels"),
    ],
)
def test_a_kind_of_image_that_cannot_be_decoded_is_refused_by_name(copied, kind, mode, color_mode, match):
    Image.new(mode, (4, 5)).save(copied / "dog" / "extra.png", kind)
    for path in copied.rglob("*.jpg"):
        path.unlink()
    with pytest.raises(RecipeError, match=rf"extra\.png cannot be decoded with color_mode: {color_mode}: {match}") as e:
        loaded(copied, color_mode=color_mode)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("preprocessing", [None, ["Normalization"]], ids=["first example", "adapted"])
def test_an_image_that_is_cut_off_is_named_while_the_run_is_prepared(copied, preprocessing):
    for path in copied.rglob("*.jpg"):
        path.unlink()
    for path in sorted(copied.rglob("*.png"))[1:]:
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(RecipeError, match=r"\.png cannot be read as an image"):
        found = {"images": str(copied), "size": [8, 8], "validation": 0.2, "preprocessing": preprocessing}
        plan(recipe(found), classifier((8, 8, 3)))


def test_folders_of_parts_are_no_classes(copied):
    (copied / "cat").rename(copied / "train")
    (copied / "dog").rename(copied / "Test")
    shutil.rmtree(copied / "fox")
    with pytest.raises(RecipeError, match="folders with parts of the data, Test, train. Name the training part"):
        loaded(copied)


def test_a_folder_without_classes_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="one folder of images .* for each class"):
        loaded(tmp_path)
    with pytest.raises(RecipeError, match="nowhere does not exist"):
        loaded(tmp_path / "nowhere")
