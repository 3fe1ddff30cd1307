"""Clusters that lose a process in the middle of a training, and go on."""

from pathlib import Path

import numpy as np
import pytest
from backends import BACKEND
from clusters import run_workers

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.skipif(BACKEND != "tensorflow", reason="starts processes of each backend itself")


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [1, 0], ids=["a worker", "the chief"])
def test_a_cluster_that_lost_a_process_resumes_to_the_same_bytes(victim, tmp_path):
    script = SUPPORT / "distributed_resume.py"
    broken = run_workers(2, script, tmp_path, victim)
    assert broken[victim].code == -9 and (tmp_path / "died").exists()
    assert broken[1 - victim].code != 0
    assert (tmp_path / "backup" / "latest.weights.h5").exists()
    again = run_workers(2, script, tmp_path, victim)
    # Of what both said, since one ends where the other does.
    assert [worker.code for worker in again] == [0, 0], "\n".join(worker.output[-3000:] for worker in again)
    first, *others = [
        [array.tobytes() for array in np.load(tmp_path / f"{what}-{index}.npz").values()]
        for what in ("undisturbed", "resumed")
        for index in (0, 1)
    ]
    assert others == [first] * 3
    kernel = np.frombuffer(first[0], "float32")
    assert np.count_nonzero(kernel == 0) == round(0.8 * kernel.size)
