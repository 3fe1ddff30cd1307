"""Reports: what the operations return."""

from prunekit.anatomy.cost.cost import Cost
from prunekit.anatomy.cost.inspection import SparsityReport
from prunekit.delivery.integers.integer_report import IntegerExport
from prunekit.delivery.packing.pack_report import PackReport
from prunekit.delivery.plots.signal_plot import signal_picture
from prunekit.delivery.reports.sensitivity import SensitivityReport
from prunekit.delivery.reports.sweeps import SweepReport
from prunekit.operations.export import ExportReport
from prunekit.operations.quantize import QuantizationResult
from prunekit.recipe.run.runner import RunResult
from prunekit.searching.search_report import SearchReport
from prunekit.techniques.cluster.cluster_report import ClusterReport
from prunekit.techniques.distill.distill_report import DistillReport
from prunekit.techniques.factorize.dimension.dimension_report import DimensionReport
from prunekit.techniques.factorize.factorize_report import FactorizeReport
from prunekit.techniques.pruning.after_training.rounds import RoundsReport
from prunekit.techniques.quantize.bits.bit_choice import BitChoice
from prunekit.techniques.quantize.quantization_report import QuantizationReport
from prunekit.techniques.shrink.channels.groups_report import GroupsReport
from prunekit.techniques.shrink.channels.shrink_report import ShrinkReport
from prunekit.techniques.shrink.graph.simplify_report import SimplifyReport
from prunekit.techniques.shrink.layers.block_report import BlocksReport

__all__ = [
    "BitChoice",
    "BlocksReport",
    "ClusterReport",
    "Cost",
    "DistillReport",
    "DimensionReport",
    "ExportReport",
    "FactorizeReport",
    "GroupsReport",
    "IntegerExport",
    "PackReport",
    "QuantizationReport",
    "QuantizationResult",
    "RoundsReport",
    "RunResult",
    "SearchReport",
    "SensitivityReport",
    "ShrinkReport",
    "SimplifyReport",
    "SparsityReport",
    "SweepReport",
    "signal_picture",
]
