"""Commands, one function each; `prunekit/cli.py` collects them.

- `output`: JSON, sections, new files, errors
- `files`: models, data and options that commands share
- `start`: init
- `runs`: compress, sweep, check, verify
- `results`: report, compare, recipes
- `scan`: sensitivity
- `searching`: search
- `evaluation`: evaluate
- `models`: inspect, convert, doctor
- `removals`: prune, shrink, factorize, simplify, remove-blocks
- `quantizing`: quantize
- `clustering`: cluster
- `exporting`: export
- `packing`: pack, unpack
"""
