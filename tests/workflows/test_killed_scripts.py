"""Scripts with backup and restore that are killed by SIGKILL, and gone on with: they end with the same bytes."""

from pathlib import Path

import numpy as np
import pytest
from killed_chains import files, in_chains, killed


@pytest.mark.thorough
@in_chains
def test_a_script_with_backup_and_restore_that_was_killed_ends_with_the_same_bytes(tmp_path, numbers, kills, phases):
    folders = killed("script", tmp_path, numbers, kills, phases)
    whole = np.load(tmp_path / "whole" / "end.npz")
    for folder in folders:
        assert files(folder) == [Path("end.npz")], "the backup goes when the training has ended"
        end = np.load(folder / "end.npz")
        assert [name for name in whole if whole[name].tobytes() != end[name].tobytes()] == [], folder.name
