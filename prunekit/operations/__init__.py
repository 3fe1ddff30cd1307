"""One file for each thing that a user asks for: its signature, its checks, its parts in order.

Commands call them, and recipe steps call them or, where a resumable run carries masks, grids or variables on, the part
that they are built on (`OneShotPruning`, `shrink_to`, `quantize_model`). One question has one answer, bit by bit, in
Python, by command and in a recipe: tests/workflows/test_three_doors.py.

- `export`: `pk.export`
- `pack`: `pk.pack`, `pk.unpack`
- `simplify`: `pk.simplify`
- `remove_blocks`: `pk.remove_blocks`
- `shrink`: `pk.shrink`
- `prune`: `pk.prune`
- `prune_in_rounds`: `pk.prune_in_rounds`
- `quantize`: `pk.quantize`
- `quantization_training`: `pk.Quantizer`, in loops of your own
- `quantization_callback`: `pk.QuantizationCallback`, in `fit`
- `choose_bits`: `pk.choose_bits`
- `cluster`: `pk.cluster`
- `factorize`: `pk.factorize`
- `distilling`: `pk.distilling`, in `fit` and in loops of your own
- `reduce_dimension`: `pk.reduce_dimension`
- `sensitivity`: `pk.sensitivity`
- `search_training`: the training of mixtures
- `search`: `pk.search`
"""
