"""What tests of hostile files share: archives of any members, limits so small that a test can reach them."""

import zipfile

import pytest

from prunekit.anatomy.files.archives import FileRefused, Limits
from prunekit.anatomy.files.model_files import load_model

SMALL = Limits(members=5, expanded_bytes=1 << 16, expansion=10, config_bytes=4096, config_levels=30, objects=50)


def packed(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def assert_refused(path, match, load=load_model):
    with pytest.raises(FileRefused, match=match) as refused:
        load(path)
    message = str(refused.value)
    assert "\n" not in message and str(path) in message, message
