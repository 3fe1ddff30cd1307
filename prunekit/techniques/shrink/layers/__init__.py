"""Fewer layers: exact rewrites, and blocks that change little.

- `identities`: calls that return their input
- `dead_branches`: branches that add zeros
- `duplicates`: calls that compute the same tensor
- `blocks`: blocks that can be removed
- `block_report`: the report of a removal of blocks
- `block_ranking`: blocks by the change without them

Design

Removing layers. The rewrites of `pk.simplify` (`identities`, `folding`, `dead_branches`, `duplicates`) and the removals
of `pk.remove_blocks` are functions on a `LayerGraph`, and run until none finds anything. A layer is rewritten only if
its `call` is Keras's own. Blocks are ranked with one compiled function, in which an argument switches each block off.
"""
