"""Models with removable blocks, and what tests compare of them."""

import numpy as np
from architectures import ARCHITECTURES, inputs_of, randomize
from networks import outputs


def relative_change(model, other, inputs):
    """The mean of the squared changes of the outputs over the squared outputs."""
    pairs = zip(outputs(model, inputs), outputs(other, inputs), strict=True)
    return np.mean([np.square(one - two).sum() / np.square(one).sum() for one, two in pairs])


def built(name):
    """An architecture with random weights, and inputs."""
    model = randomize(ARCHITECTURES[name]())
    return model, inputs_of(model, seed=1, examples=6)


def rows_by_name(report):
    """{name of a block: its row in a report}."""
    return {row.name: row for row in report.blocks}
