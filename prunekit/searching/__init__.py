"""The search for the smallest file: levels and ranks of weights, and channels, chosen together.

- `choice`: one level for each variable, exactly: a mixed-integer program
- `candidates`: values of weights at each level, and of removals
- `judge`: the examples and the metric
- `repaired_scan`: a model with changed weights, the layers behind them fitted
- `searched_model`: what may be changed of a model
- `time_limit`: what there is time for
- `latencies`: seconds of layers, each as a file of its own, and of whole files
- `table`: errors of all levels, one at a time
- `shared_scan`: the table measured by a Ray cluster
- `costs`: errors, bytes, seconds and arenas of mixtures
- `building`: the file of a mixture
- `question`: what is asked, and the files that may answer it
- `made_files`: the files that were made and trained, and the best one that meets all bounds
- `finding`: which files are made, until one answers the question
- `known_files`: records that are kept for other questions, among them what is known of files
- `search_report`: the report
- `search_run`: one search

Design

A table of errors is only worth something if errors add up. They do so if each level is measured as the file will have
it: fitted to its layer's outputs, with the layers behind it fitted to theirs (`repaired_scan`), on other examples than
the fits. Without the fit behind, the error of a first layer at 90 % zeros is five times too large; on the examples of
the fit it is a thousand times too small, since a layer of 3,136 inputs reproduces any 256 examples. Measured so, the
sum predicts the error of a mixture within a factor of two, mostly from above, and ranks mixtures as their files do
(docs/searching.md). Only the layers that read a change are fitted: what is left after them is small.

Files are fitted to more examples than the table, whose time is that of its fits: a layer of 3,136 inputs that is fitted
to 256 examples has twice the error of one that is fitted to 2,048, a convolution, which has hundreds of vectors in each
example, hardly more. So errors of wide layers are too large in the table, and the bound, which moves, makes up for it.

Errors are squared changes of the outputs (`core/outputs/output_error.py`), with and without labels. Weighting them by
Fisher, which is what a divergence of the probabilities does, orders files in the same way: on 15 files of ResNet-8 for
Fashion-MNIST, of single techniques and of all together, the divergence is 0.73 to 1.03 times the squared error, and the
drop of accuracy varies by as much as a fifth of a point at the same value of either.

The bytes of a kernel are a product: bits of an entry, kept inputs, kept outputs. `choice` has one unknown for each
entry of such a table, whose sums along the axes are the variables' own; only these are whole numbers, and the program
is exact. Levels with equal costs share unknowns.

A low rank is a level of a weight, not another model: the product of both rounded arrays stands in the place of the
kernel, so that rank and bits are measured together, in the same walk. In the costs, one array has the inputs and the
other one the outputs, so that a removal saves of each what it saves in the file. Arrays of low rank are not pruned: in
packed files of the networks measured, pruned whole kernels were smaller.

Each layer has to have room for what it reads and writes. What the arena holds besides, such as the tensor that a
residual block adds at its end, is known from the files before.

Files, not predictions, are compared with the drop that was asked for. The bound of the error is moved until the file
holds the drop on examples for the choice; the smallest of these files that holds it on held-out examples
is delivered. Bolder mixtures are trained, if wanted, from the file that was made: on its grids, with its zeros.

At an equal error, predicted or measured, files lose up to a point more or less of the metric, alike on the examples
that choose and on those that judge: it is a property of the file, not of the examples. The divergence of the outputs
does not tell them apart, and factors for the techniques differ by layer. What helps is to make more files, unlike each
other: those of fewer techniques.

The table is not measured again from the solution: the fit of the layers behind, without which errors say nothing, would
undo the rounding and the zeros that the solution has there. Scaling the errors of each technique to what files had
chooses no smaller files (tried on packed networks for MNIST, where zeros cost more than their sum).

Latency is measured, not modelled by operations: kernels of the same arithmetic differ by a factor of three. What a file
of many layers takes beside their sum is known from the files that were made before (`made_files`).
"""
