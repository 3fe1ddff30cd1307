"""The backend, and what is done to models and optimizers for a while.

- `partial_files`: files under another name until they are whole
- `backend`: creation, reading and writing of variables
- `arguments`: checks of what users pass to loops
- `compilation`: compiled functions, and when they are traced again
- `patching`: methods replaced for a while, mainly `optimizer.apply`
- `variable_values`: variables with other values for a while
- `substituted_values`: other values for weights in every call of a model
- `kept_grids`: remembers which weights lie on integer grids
- `optimizers`: the optimizers of a model, nested ones included
- `ray_tasks`: calls of a function on a Ray cluster
- `environment`: devices, precision, versions
- `hidden_output`: hides what C++ code prints
- `jax_state`: steps that are pure functions of their state
- `losses`: losses per batch and per example
- `differentiation`: gradients and Hessian products on every backend
- `snapshot`: named arrays in one file, written atomically
- `model_function`: a model on a batch, compiled
- `random_state`: random generators, saved and restored
- `model_copies`: copies of models, and what layers derive from their weights

Design

`sparsity/` and `anatomy/` use Keras operations. In training, the backends differ in how state reaches a compiled step.
TensorFlow's steps read variables, and PyTorch's steps run eagerly; on both, masks are ordinary variables. JAX's steps
are pure functions: every value that is not an argument is a constant. On JAX the masks are therefore added to the
optimizer's variables while a scope is open (`jax_state`), because every Keras loop passes these variables to the step.
Masks are not saved with the optimizer. In `fit` they are added for one call at a time: the step gets the state with the
masks, and returns it without them, so that between batches the optimizer is unmodified on JAX, too. When a batch cannot
be read, `StateOfFit` restores the state that `fit` took; `fit` itself would restore the state of its last step, with
weights from before the masks changed.

JAX shares traces between functions that are equal, and a bound method equals itself, so a step that was traced with the
masks of one store would also run for the next store. Each scope therefore gives the model a new `train_step`.

`fit` on JAX writes its state to the variables only on request (`jax_state_sync`), and reading a counter makes Python
wait for the device. The callback therefore computes how many updates can pass before its next action
(`Pruner.note_updates`), and requests the state only then. Callbacks must not read `self.model` in between, because
Keras synchronises there.

A `tf.function` that gets a Keras variable as an argument silently converts it to NumPy and back at each call. Compiled
functions are therefore given `backend.value_now(variable)`, and a test refuses NumPy while masks are chosen.

`sparsity/sums.py` adds in a fixed order. Each backend sums in a different order, so units that are almost equally
important would otherwise be ranked differently.

On JAX the k-th largest value is found by a loop that determines one bit in each pass. JAX compiles separately for each
length, which takes a second and a half for the histograms that are used elsewhere, and a fifth of that for the loop.
"""
