"""What a model costs, and what its zeros save.

- `cost`: multiply-accumulates and bytes of a forward and a backward pass
- `inspection`: the report on weights and zeros: `pk.inspect`
"""
