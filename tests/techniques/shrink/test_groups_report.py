"""What is shown of groups of channels, before and after a removal."""

import io
import json

import keras
import numpy as np
import pytest
from rich.console import Console

import prunekit as pk
from prunekit.anatomy.records.sections import MOST_BARS, Section
from prunekit.delivery.reports.terminal_report import print_section
from prunekit.techniques.shrink.channels import shrink_report
from prunekit.techniques.shrink.channels.shrink_report import ShrunkGroup, groups_section

L = keras.layers


@pytest.fixture(scope="module")
def residual():
    """Two convolutions that are added: one group; a softmax and a LayerNormalization keep channels."""
    inputs = keras.Input((8, 8, 3))
    first = L.Conv2D(6, 3, padding="same", name="first")(inputs)
    x = L.Add()([L.BatchNormalization(name="norm")(first), L.Conv2D(6, 3, padding="same", name="second")(first)])
    x = L.Dense(5, name="narrow")(L.GlobalAveragePooling2D()(x))
    x = L.LayerNormalization(name="wall")(x)
    return keras.Model(inputs, L.Dense(4, activation="softmax", name="out")(x), name="residual")


def test_a_group_has_every_axis_that_shrinks_with_it(residual):
    report = pk.channel_groups(residual)
    (group,) = report.groups
    assert (group.name, group.channels, group.parts, report.channels) == ("first", 6, 1, 6)
    axes = {(one.weight, one.axis): one.shape for one in group.axes}
    assert axes[("first/kernel", 3)] == (3, 3, 3, 6)
    assert {("second/kernel", 2), ("second/kernel", 3), ("norm/moving_mean", 0), ("narrow/kernel", 0)} <= set(axes)


def test_the_axes_of_a_group_are_those_that_a_removal_cuts(residual):
    report, cut = pk.channel_groups(residual), pk.shrink(residual, channels=0.5)[1].kept
    assert {(one.weight, one.axis) for group in report.groups for one in group.axes} == {
        (name, axis) for name, axes in cut.items() for axis in axes
    }


def test_the_reasons_of_the_channels_that_stay_are_named(residual):
    stops = {stop.name: (stop.channels, stop.layers) for stop in pk.channel_groups(residual).skipped}
    assert stops == {"wall": (5, ("narrow",)), "out": (4, ("out",))}


def test_the_table_names_kernels_with_their_axes_and_counts_all_axes(residual):
    groups, stops = pk.channel_groups(residual).sections()
    ((name, channels, axes, kernels),) = groups.rows
    assert (name, channels, axes) == ("first", 6, 10)
    assert kernels == ("first/kernel (3)", "second/kernel (2 and 3)", "narrow/kernel (0)")
    assert groups.total == ("All groups", 6, 10, "")
    assert ("out", 4, "softmax over the channels", ("out",)) in stops.rows


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_table_fits_a_narrow_terminal(residual, width):
    for section in pk.channel_groups(residual).sections():
        console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
        print_section(section, console)
        assert max(map(len, console.file.getvalue().splitlines())) <= width


def test_parts_are_shown_only_where_a_group_has_several():
    inputs = keras.Input((8, 8, 4))
    x = L.Conv2D(8, 3, groups=2, name="grouped")(inputs)
    report = pk.channel_groups(keras.Model(inputs, L.Dense(2)(L.GlobalMaxPooling2D()(x))))
    section = report.sections()[0]
    assert [column.name for column in section.columns] == ["Group", "Channels", "Parts", "Axes", "Kernels (axis)"]
    assert section.rows[0][:3] == ("grouped", 8, 2)
    assert "grouped: 8 channels in 2 parts" in str(report)


def test_json_has_all_fields_and_reads_back(residual):
    for report in (pk.channel_groups(residual), pk.shrink(residual, channels=0.5)[1]):
        assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
        for section in report.sections():
            assert Section.from_dict(json.loads(json.dumps(section.to_dict()))).rows == section.rows
    found = pk.channel_groups(residual).to_dict()
    assert found["groups"][0]["axes"][0] == {"weight": "first/kernel", "axis": 3, "shape": [3, 3, 3, 6]}


def test_an_output_has_no_path_and_a_place_all_the_same():
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, name="only")])
    report = pk.channel_groups(model)
    assert report.groups == () and report.sections()[0].notes == ("No channels can be removed.",)
    assert report.sections()[1].rows[0][:2] == ("outputs", 3)
    assert str(report).splitlines()[1] == "  stays: outputs: an output of the model (3 channels)"


def test_a_model_that_cannot_be_followed_is_refused():
    class Branching(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = L.Dense(3)

        def call(self, x, training=False):
            return self.inner(keras.ops.relu(x) if training else x)

    model = Branching()
    model(np.zeros((2, 4), "float32"))
    with pytest.raises(ValueError, match="cannot be followed: it must consist of Keras layers and keras.ops alone"):
        pk.channel_groups(model)
    with pytest.raises(TypeError, match="Received: "):
        pk.channel_groups("model.keras")


def test_the_verdict_has_what_is_left_and_says_where_macs_are_not_known(residual):
    _, report = pk.shrink(residual, channels=0.5)
    assert report.verdict().endswith("3 of 6 channels are left.") and "MACs (0." in report.verdict()
    unknown = shrink_report.ShrinkReport("net", (10, 5), (None, None), ())
    assert unknown.verdict() == "5 of 10 parameters (0.500), an unknown number of MACs, 0 of 0 channels are left."


def groups_of(count):
    return [ShrunkGroup(f"layer_{i}", 8 + i % 7, 4, 3, (0, 1, 2, 3)) for i in range(count)]


def test_the_picture_has_the_largest_groups_in_the_models_order():
    (picture,) = groups_section(groups_of(75)).pictures
    bars = picture.data["groups"]
    assert len(bars) == MOST_BARS and "The 60 largest of 75 groups" in picture.caption
    order = [int(bar["name"].removeprefix("layer_")) for bar in bars]
    assert order == sorted(order)
    left = [group.before for group in groups_of(75) if group.name not in {bar["name"] for bar in bars}]
    assert max(left) <= min(bar["before"] for bar in bars)
    assert "All groups" in groups_section(groups_of(60)).pictures[0].caption


def test_why_groups_stay_whole_is_a_column_only_where_groups_do(residual):
    assert "Stays whole because" not in [column.name for column in groups_section(groups_of(3)).columns]
    model = keras.Sequential([keras.Input((4,)), L.Dense(6, name="a"), L.Dense(6, name="b"), L.Dense(2)])
    section = pk.shrink(model, channels=0.5, exclude="a")[1].sections()[0]
    assert section.rows == (("a", 6, 6, 3, "excluded by 'a'"), ("b", 6, 3, 3, ""))
