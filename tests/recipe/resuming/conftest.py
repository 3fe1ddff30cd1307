"""A run that was not interrupted, and one that was: trained once for the tests of a file."""

import shutil

import pytest
from unfinished_runs import WHOLE, interrupted, network

from prunekit.recipe.run.runner import compress


@pytest.fixture(scope="module")
def whole(pairs):
    """A run that was not interrupted."""
    return compress(WHOLE, network(), pairs)


@pytest.fixture(scope="module")
def begun(pairs, tmp_path_factory):
    """An unfinished run, in the middle of its first prune step."""
    return interrupted(pairs, tmp_path_factory.mktemp("begun") / "run")


@pytest.fixture
def unfinished(begun, tmp_path):
    """A copy of it, of a run into tmp_path / "run"."""
    return shutil.copytree(begun, tmp_path / "run.unfinished")
