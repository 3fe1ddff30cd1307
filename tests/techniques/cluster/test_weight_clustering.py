"""Weights on centroids with data: against plain least squares, and against the nearest centroids."""

import numpy as np
import pytest

from prunekit.techniques.cluster.codebooks import Channels, Codebooks
from prunekit.techniques.cluster.weight_clustering import _refitted


def problem(seed=0, inputs=6, outputs=4, rows=40, clusters=3):
    rng = np.random.default_rng(seed)
    data = rng.normal(size=(rows, inputs)) @ rng.normal(size=(inputs, inputs))
    wanted = rng.normal(size=(inputs, outputs))
    places = rng.integers(0, clusters, (inputs, outputs))
    kept = rng.uniform(size=(inputs, outputs)) > 0.3
    return data, np.where(kept, wanted, 0.0), places, kept


@pytest.mark.parametrize("run", [None, 1, 2])
def test_refitted_centroids_are_the_least_squares_of_the_outputs(run):
    data, wanted, places, kept = problem()
    channels = Channels(wanted.shape, (1,), run)
    table = np.tile(np.array([-1.0, 0.5, 2.0], "float32"), (channels.count, 1))
    numbers = np.array(channels.numbers)[None]
    found = _refitted(
        wanted[None], (data.T @ data)[None], Codebooks(channels, table), numbers, places[None], kept[None]
    )
    for number in range(channels.count):
        # One column of the design for each centroid: the outputs of a kernel that is 1 where it stands.
        columns, sums = [], []
        for place in range(3):
            members = (places == place) & kept & (channels.numbers == number)
            columns.append((data @ members.astype(float)).ravel())
            sums.append(members.sum())
        outputs = (data @ np.where(channels.numbers == number, wanted, 0.0)).ravel()
        solved = np.linalg.lstsq(np.stack(columns, axis=1), outputs, rcond=None)[0]
        for place in range(3):
            expected = solved[place] if sums[place] else table[number, place]
            assert found.table[number, place] == pytest.approx(expected, rel=1e-4)
