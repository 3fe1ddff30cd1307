"""Policies: how masks change while a model is trained."""

from prunekit.techniques.pruning.masks.policy import MaskPolicy
from prunekit.techniques.pruning.policies.alternating import ACDC
from prunekit.techniques.pruning.policies.channel_groups import ChannelGroups
from prunekit.techniques.pruning.policies.gradual import Gradual
from prunekit.techniques.pruning.policies.regrow import SET, RigL
from prunekit.techniques.pruning.policies.straight_through import StraightThrough
from prunekit.techniques.pruning.policies.structure_decay import StructureDecay

__all__ = [
    "ACDC",
    "ChannelGroups",
    "Gradual",
    "MaskPolicy",
    "RigL",
    "SET",
    "StraightThrough",
    "StructureDecay",
]
