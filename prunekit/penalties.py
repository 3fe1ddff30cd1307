"""Penalties: callbacks that train channels towards zero, so that `pk.shrink` can remove them."""

from prunekit.techniques.shrink.channels.channel_penalties import GroupLasso, GrowingRegularization

__all__ = [
    "GroupLasso",
    "GrowingRegularization",
]
