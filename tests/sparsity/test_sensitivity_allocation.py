"""SensitivityAllocation: the least sum of predicted damages, exact counts, more sparsity never restores an entry."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from prunekit.sparsity.convex_shares import least_total, lower_hull
from prunekit.sparsity.sensitivity_allocation import SensitivityAllocation

SIZES = {"a": 100, "b": 60, "c": 1000}
LEVELS = (0.5, 0.8, 0.9)
ERRORS = {"a": (0.01, 0.02, 0.05), "b": (0.5, 0.7, 0.9), "c": (0.1, 0.3, 0.4)}


def scan(**changes):
    rows = [
        {
            **{"target": name, "technique": "prune", "level": "sparsity", "value": level},
            **{"entries": round(level * SIZES[name]), "metrics": {"accuracy": 1 - error}, "output_error": error},
        }
        for name, errors in ERRORS.items()
        for level, error in zip(LEVELS, errors, strict=True)
    ]
    measures = [{"name": "accuracy", "direction": "max", "fraction": True}, {"name": "odd", "direction": None}]
    targets = [{"name": name, "shape": [size], "size": size} for name, size in SIZES.items()]
    values = {"sensitivity_version": 1, "complete": True, "model": "net", "measures": measures, "rows": rows}
    return {**values, "targets": targets, "dense": {"accuracy": 1.0, "odd": 0.0}, **changes}


def weights(names="abc", **sizes):
    return [SimpleNamespace(name=name, shape=({**SIZES, **sizes}[name],), in_axes=(), out_axes=()) for name in names]


def counts(sparsity, allocation):
    found = allocation.sparsities(sparsity, weights())
    return [round(share * size) for share, size in zip(found, SIZES.values(), strict=True)]


def test_counts_are_exact_and_never_fall():
    for damage in ("output_error", "accuracy"):
        rows = [counts(sparsity, SensitivityAllocation(scan(), damage)) for sparsity in np.linspace(0, 0.995, 200)]
        assert [sum(row) for row in rows] == [round(s * 1160) for s in np.linspace(0, 0.995, 200)]
        assert all(low <= high for row, other in itertools.pairwise(rows) for low, high in zip(row, other, strict=True))
        assert all(count < size for row in rows for count, size in zip(row, SIZES.values(), strict=True))


def test_the_predicted_damage_is_the_least_of_all_allocations_on_the_grid():
    def damage(shares):
        grid = (0.0, *LEVELS)
        return sum(np.interp(s, grid, np.square([0.0, *ERRORS[n]])) for s, n in zip(shares, SIZES, strict=True))

    shares = SensitivityAllocation(scan()).sparsities(0.7, weights())
    random, sizes = np.random.default_rng(0), np.array(list(SIZES.values()))
    for _ in range(2000):
        other = random.uniform(0, 0.9, 3)
        if other @ sizes >= 0.7 * sizes.sum():
            assert damage(other) >= damage(shares) - 1e-9


@pytest.mark.parametrize("damage", ["output_error", "accuracy"])
def test_an_insensitive_weight_goes_first_and_a_sensitive_one_last(damage):
    allocation = SensitivityAllocation(scan(), damage)
    shares = dict(zip(SIZES, allocation.sparsities(0.85, weights()), strict=True))
    assert shares["c"] > shares["b"]
    order = [counts(sparsity, allocation) for sparsity in (0.02, 0.05)]
    assert [row[1] for row in order] == [0, 0]


def test_the_hull_leaves_out_levels_above_it():
    assert lower_hull([0.0, 0.5, 0.8, 1.0], [0.0, 0.9, 0.2, 1.0]) == [0, 2, 3]
    assert least_total(3, [4, 4], [([0.0, 1.0], [0.0, 1.0]), ([0.0, 1.0], [0.0, 1.0])]) == [3, 0]


def test_a_damage_that_is_no_number_is_the_worst():
    worst = scan()
    for row in worst["rows"]:
        if row["target"] == "a":
            row["output_error"] = None
    assert counts(0.5, SensitivityAllocation(worst))[0] == 0


def test_a_file_is_read_and_named(tmp_path):
    file = tmp_path / "scan.json"
    file.write_text(json.dumps(scan()))
    for given in (file, str(file)):
        found = SensitivityAllocation(given)
        assert found.file == str(file) and counts(0.7, found) == counts(0.7, SensitivityAllocation(scan()))
    assert SensitivityAllocation(scan()).file == "scan of net"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("", "output_error", "Expected the file of a scan"),
        ("missing.json", "output_error", "does not exist"),
        ({}, "output_error", "'sensitivity_version' is missing"),
        (scan(sensitivity_version=2), "output_error", "its sensitivity_version is not 1"),
        (scan(complete=False), "output_error", "not complete"),
        (scan(), "acuracy", "one of output_error, accuracy. Received: 'acuracy'. Did you mean"),
        (scan(), "odd", "one of output_error, accuracy"),
    ],
    ids=["none", "missing", "empty", "version", "incomplete", "typing", "no direction"],
)
def test_scans_that_cannot_be_used_are_refused(file, damage, message):
    with pytest.raises(ValueError, match=message):
        SensitivityAllocation(file, damage)


def test_weights_that_the_scan_does_not_know_are_refused():
    allocation = SensitivityAllocation(scan())
    with pytest.raises(ValueError, match="measured 'a' with 100 entries. Received: a weight of 5"):
        allocation.sparsities(0.5, weights(a=5))
    with pytest.raises(ValueError, match="Received: the weight 'd', which it did not measure"):
        allocation.sparsities(0.5, weights("abd", d=3))
