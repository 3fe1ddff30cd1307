"""scripts/bench: the page it writes has all its parts; never how fast anything is."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """(page, raw figures) of a run on a tiny perceptron."""
    folder = tmp_path_factory.mktemp("bench")
    page, raw = folder / "docs" / "benchmarks.md", folder / "raw.json"
    subprocess.run(
        [ROOT / "scripts" / "bench", "--quick", "--smoke", "--models", "perceptron", "--output", page, "--json", raw],
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        timeout=600,
    )
    return page.read_text(encoding="utf-8"), json.loads(raw.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_contestant_does_all_its_steps_and_mask_updates_are_told_apart(smoke):
    trainings = smoke[1]["models"]["perceptron"]["trainings"]
    updates = {
        library: {name: (len(run["steps"]), sum(row[3] for row in run["steps"])) for name, run in runs.items()}
        for library, runs in trainings.items()
    }
    # prunekit decides before the first step as well, and always at the end of its schedule.
    assert updates == {
        "prunekit": {"plain": (12, 0), "control": (12, 0), "100": (12, 2), "10": (12, 3), "1": (10, 10)},
        "tfmot": {"plain": (12, 0), "10": (12, 1), "1": (10, 10)},
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_names_command_and_machine_and_has_every_table(smoke):
    page, raw = smoke
    assert "`scripts/bench --quick --smoke --models perceptron`" in page
    assert "cores, Linux, Python 3." in page or "cores, Darwin, Python 3." in page
    assert "the figures say nothing" in page
    assert os.uname().nodename not in page
    for heading in (
        "## Wanted and measured",
        "## Perceptron",
        "## Finding the largest fifth",
        "## Cached prefixes",
        "## Backward in parts",
        "## Start-up",
        "## How it is measured",
    ):
        assert heading in page
    assert set(raw["startup"]) >= {"prunekit --help", "prunekit check digits"}
    rows = [line for line in page.splitlines() if line.startswith("| prunekit, frequency")]
    assert [row.split("|")[1].strip() for row in rows] == [
        *(f"prunekit, frequency {frequency}" for frequency in (100, 10, 1)),
        "prunekit, frequency 2",
    ]
    assert all(row["peak"] >= row["before"] > 0 for row in raw["models"]["perceptron"]["memories"].values())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_table_of_the_page_is_rectangular(smoke):
    widths: set[int] = set()
    for line in [*smoke[0].splitlines(), ""]:
        if line.startswith("|"):
            widths.add(line.count("|"))
        else:
            assert len(widths) <= 1
            widths = set()
