"""What a model costs, and what its zeros save.

- `cost`: multiply-accumulates and bytes of a forward and a backward pass
- `inspection`: the report on weights and zeros: `pk.inspect`

Design

`anatomy/graph/tracing.py` runs a model on tensors without values, in inference and in training mode;
`anatomy/graph/example_inputs.py` makes these tensors from the declared inputs, or from arrays or shapes that a user
gives. `anatomy/graph/flow.py` finds in the graph of that pass the tensors that get a gradient: on TensorFlow as a tape
does, elsewhere from the order of the calls. `anatomy/layers/counting.py` holds the counting formulas of the layer
types; `cost` adds up the counts. In the tests, `profiled` makes the same counts from the operations of TensorFlow's
graphs, including loops, and TensorFlow's profiler is a second reference.

A figure that is not known is `None`, and never 0. A total is the sum of the known figures, and `None` if none is known.

The rows of KerasHub's layers are found by the name of a class in the package `keras_hub`, so that no module imports
KerasHub. A test compares the rows with the source of the installed version: each weight that a class creates has a
role, and each class that multiplies matrices itself has a formula or is marked as not counted.
"""
