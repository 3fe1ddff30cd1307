"""What the comparisons share."""

import pytest
from one_weight import holding

from prunekit.sparsity.schedules import OneShot
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.pruner_run import PrunerRun


@pytest.fixture
def pruned_once():
    """Function (weight, schedule or sparsity, **options) -> the mask that one update gives it, True = kept."""

    def prune(weight, asked=0.5, step=0, **options):
        layer = holding(weight)
        schedule = OneShot(asked) if isinstance(asked, float) else asked
        pruner = PrunerRun(layer, schedule, PruningOptions(**{"origin": -step, "allocation": "uniform", **options}))
        pruner.updater.follow_schedule()
        return pruner.masks[pruner.targets[0].name]

    return prune
