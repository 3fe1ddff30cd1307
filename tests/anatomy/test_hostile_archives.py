"""Archives made to harm whoever opens them: each is refused in one line, and writes and unpacks nothing."""

import io
import stat
import struct
import zipfile
from dataclasses import fields, replace

import keras
import numpy as np
import pytest
from hostile_files import SMALL, assert_refused, packed

from prunekit.anatomy.files.archives import LIMITS, FileRefused, Limits, checked_archive
from prunekit.anatomy.files.model_files import CONFIG, WEIGHTS, check_model_file, load_model


def test_a_sound_file_passes_and_is_left_as_it_is(model_file, perceptron, samples):
    before = model_file.read_bytes()
    check_model_file(model_file)
    loaded = load_model(model_file)
    assert model_file.read_bytes() == before
    np.testing.assert_array_equal(loaded(samples[0]), perceptron(samples[0]))


def test_a_file_packed_again_with_compression_passes(tmp_path, members, perceptron, samples):
    loaded = load_model(packed(tmp_path / "again.keras", members, zipfile.ZIP_DEFLATED))
    np.testing.assert_array_equal(loaded(samples[0]), perceptron(samples[0]))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.txt",
        "assets/../../outside.txt",
        "/outside.txt",
        "..",
        "assets\\..\\..\\outside.txt",
        "C:outside.txt",
        "assets/out\nside.txt",
        "assets/out\x1bside.txt",
    ],
)
def test_a_member_that_would_be_written_elsewhere_is_refused(tmp_path, members, name):
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    path = packed(folder / "model.keras", members | {name: b"hostile", "assets/fine.txt": b""})
    assert_refused(path, "has a name that is not a path inside the archive")
    assert not list(tmp_path.rglob("outside*"))


def test_a_name_that_ends_early_for_some_readers_is_refused(tmp_path, members):
    # zipfile cuts names at a zero byte; the name as it stands in the file is what counts.
    path = packed(tmp_path / "model.keras", members | {"assets/xxx.txt": b""})
    path.write_bytes(path.read_bytes().replace(b"assets/xxx.txt", b"assets/x\0x.txt"))
    assert_refused(path, "has a name that is not a path inside the archive")


def test_a_symbolic_link_is_refused(tmp_path, members):
    path = packed(tmp_path / "model.keras", members)
    link = zipfile.ZipInfo("assets/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    assert_refused(path, "'assets/link' is a link or a device")


def test_a_duplicate_member_is_refused(tmp_path, members):
    path = packed(tmp_path / "model.keras", members)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(CONFIG, b"{}")
    assert_refused(path, "'config.json' is in the archive twice")


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["bzip2", "lzma"])
def test_a_rare_compression_is_refused(tmp_path, members, compression):
    assert_refused(
        packed(tmp_path / "m.keras", members, compression), "uses a compression other than stored or deflated"
    )


def changed_entry(path, name, offset, content):
    """Overwrites `content` at `offset` inside the entry for `name` in the archive's table of contents."""
    raw = bytearray(path.read_bytes())
    at = raw.rindex(name.encode()) - 46
    assert raw[at : at + 4] == b"PK\1\2"
    raw[at + offset : at + offset + len(content)] = content
    path.write_bytes(raw)


def test_an_encrypted_member_is_refused(tmp_path, members):
    path = packed(tmp_path / "model.keras", members)
    changed_entry(path, WEIGHTS, 8, b"\1\0")
    assert_refused(path, "'model.weights.h5' is encrypted")


def test_a_wrong_size_is_refused(tmp_path, members):
    stored = packed(tmp_path / "stored.keras", members)
    changed_entry(stored, WEIGHTS, 24, struct.pack("<I", 0x7FFF_FFFF))
    assert_refused(stored, "is stored uncompressed, but has two different sizes")
    deflated = packed(tmp_path / "deflated.keras", members, zipfile.ZIP_DEFLATED)
    changed_entry(deflated, WEIGHTS, 24, struct.pack("<I", 0x7FFF_FFFF))
    assert_refused(deflated, "declare 2,147,4.* bytes, more than 100 times the file's")


def test_a_size_that_is_too_small_is_refused(tmp_path, members):
    path = packed(tmp_path / "model.keras", members, zipfile.ZIP_DEFLATED)
    changed_entry(path, WEIGHTS, 24, struct.pack("<I", 100))
    assert_refused(path, "model.weights.h5 is damaged")


def test_members_that_share_their_bytes_count_each(tmp_path):
    # Fifield 2019, "A better zip bomb": the table of contents names one packed stretch many times.
    path = packed(tmp_path / "shared.zip", {"aaaa": bytes(1 << 15)}, zipfile.ZIP_DEFLATED)
    raw = path.read_bytes()
    start, end = raw.index(b"PK\1\2"), raw.index(b"PK\5\6")
    entry, tail = raw[start:end], bytearray(raw[end:])
    table = b"".join(entry.replace(b"aaaa", f"aaa{i}".encode()) for i in range(4))
    tail[8:16] = struct.pack("<HHI", 4, 4, len(table))
    path.write_bytes(raw[:start] + table + tail)
    with pytest.raises(FileRefused, match="declare 131,072 bytes"), checked_archive(path, SMALL):
        pass
    with checked_archive(path, replace(SMALL, expanded_bytes=131_072)) as archive:
        assert len(archive.namelist()) == 4


@pytest.mark.parametrize("size", [0, 1])
def test_unpacked_bytes_at_the_limit_and_one_more(tmp_path, size):
    path = packed(tmp_path / "zeros.zip", {"zeros": bytes(SMALL.expanded_bytes + size)}, zipfile.ZIP_DEFLATED)
    if size == 0:
        with checked_archive(path, SMALL) as archive:
            assert archive.read("zeros") == bytes(SMALL.expanded_bytes)
    else:
        with pytest.raises(FileRefused, match="save it again without compression"), checked_archive(path, SMALL):
            pass


def test_the_allowance_grows_with_the_file():
    assert LIMITS.allowance(1) == LIMITS.expanded_bytes == LIMITS.allowance(LIMITS.expanded_bytes // LIMITS.expansion)
    assert LIMITS.allowance(10 * LIMITS.expanded_bytes) == 10 * LIMITS.expanded_bytes * LIMITS.expansion


def test_members_at_the_limit_and_one_more(tmp_path):
    contents = {f"m{i}": b"" for i in range(SMALL.members)}
    with checked_archive(packed(tmp_path / "five.zip", contents), SMALL) as archive:
        assert len(archive.namelist()) == SMALL.members
    path = packed(tmp_path / "six.zip", contents | {"one more": b""})
    with pytest.raises(FileRefused, match="at most 5 members. Received: 6"), checked_archive(path, SMALL):
        pass


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
def test_limits_are_positive_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} must be (at least 1|an int). Received: {name}="):
        Limits(**{name: value})


@pytest.mark.parametrize("cut", [0.0, 0.2, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_refused(tmp_path, model_file, cut):
    content = model_file.read_bytes()
    path = tmp_path / "cut.keras"
    path.write_bytes(content[: int(cut * len(content))])
    assert_refused(path, "is not a .keras file: it is damaged")


def test_any_changed_byte_gives_a_model_or_one_line(tmp_path, model_file, perceptron):
    content, random = model_file.read_bytes(), np.random.default_rng(4)
    path, outcomes = tmp_path / "changed.keras", set()
    for at in random.integers(0, len(content), 40):
        changed = bytearray(content)
        changed[at] ^= int(random.integers(1, 256))
        path.write_bytes(changed)
        try:
            outcomes.add(type(load_model(path)))
        except FileRefused as error:
            assert "\n" not in str(error)
            outcomes.add(FileRefused)
    assert outcomes <= {keras.Sequential, FileRefused} and FileRefused in outcomes


def test_folders_and_other_names_are_refused(tmp_path, model_file):
    (tmp_path / "folder.keras").mkdir()
    assert_refused(tmp_path / "folder.keras", "is a folder")
    assert_refused(tmp_path / "missing.keras", "does not exist")
    assert_refused(tmp_path / "model.h5", "only .keras files are read")
    with pytest.raises(FileRefused, match="does not exist"):
        check_model_file("zero\0byte.keras")


def test_weights_in_npz_are_refused(tmp_path, members):
    # Keras would read them with NumPy; it writes them as pickled objects.
    content = io.BytesIO()
    np.savez(content, **{"layers/dense": np.array([{"0": 1}], object)})
    path = packed(tmp_path / "m.keras", {CONFIG: members[CONFIG], "model.weights.npz": content.getvalue()})
    assert_refused(path, "it has no model.weights.h5")
