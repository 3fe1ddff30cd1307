"""Fewer layers: exact rewrites, and blocks that change little.

- `identities`: calls that return their input
- `dead_branches`: branches that add zeros
- `duplicates`: calls that compute the same tensor
- `blocks`: blocks that can be removed
- `block_report`: the report of a removal of blocks
- `block_ranking`: blocks by the change without them
"""
