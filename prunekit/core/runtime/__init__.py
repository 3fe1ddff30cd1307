"""The backend, and what is done to models and optimizers for a while.

- `partial_files`: files under another name until they are whole
- `backend`: creation, reading and writing of variables
- `arguments`: checks of what users pass to loops
- `compilation`: compiled functions, and when they are traced again
- `patching`: methods replaced for a while, mainly `optimizer.apply`
- `layer_precision`: the precision in which layers compute
- `variable_values`: variables with other values for a while
- `kept_grids`: remembers which weights lie on integer grids
- `optimizers`: the optimizers of a model, nested ones included
- `environment`: devices, precision, versions
- `jax_state`: steps that are pure functions of their state
- `losses`: losses per batch and per example
- `differentiation`: gradients and Hessian products on every backend
- `snapshot`: named arrays in one file, written atomically
- `model_function`: a model on a batch, compiled
- `random_state`: random generators, saved and restored
"""
