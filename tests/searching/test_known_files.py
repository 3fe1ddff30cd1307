"""What a search keeps of its files for its next questions."""

import pytest

from prunekit.searching.costs import Mixture
from prunekit.searching.known_files import KnownFiles
from prunekit.searching.question import Made

pytestmark = pytest.mark.one_backend


def test_latencies_are_kept_as_shares_of_the_file_in_float32(tmp_path):
    path, notes = tmp_path / "files.json", []
    one = Made(Mixture({}, {}, 0.1, {"latency": 0.5}, 0), "a model", (0.1, 0.1), 0.1, 100, 0.003)
    KnownFiles(path, {"question": 1}, notes, whole=0.010).with_file(one)
    # The machine is half as fast now.
    (found,) = KnownFiles(path, {"question": 1}, notes, whole=0.020).made()
    assert found.seconds == pytest.approx(0.006) and found.bytes == 100 and found.built is None
    assert KnownFiles(path, {"question": 2}, notes, whole=0.020).made() == [] and notes == []
