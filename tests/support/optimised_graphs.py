"""What TensorFlow's graph optimizer leaves of a compiled step."""

from tensorflow.python.eager import context


def reads_that_race(step, *arguments):
    """Names of (assignment, read) of one variable, between which the optimised graph of a tf.function has no order."""
    context.context().enable_run_metadata()
    try:
        step(*arguments)
        # The others ran before, also in other tests.
        graph = context.context().export_run_metadata().function_graphs[-1].post_optimization_graph
    finally:
        context.context().disable_run_metadata()
    assert any(node.op.startswith("Assign") for node in graph.node)
    return list(_races({node.name: node for node in graph.node}))


def _races(nodes):
    def before(node):
        seen, left = set(), [node.name]
        while left:
            names = {text.lstrip("^").split(":")[0] for text in nodes[left.pop()].input} & nodes.keys() - seen
            seen |= names
            left += names
        return seen

    reads = [node for node in nodes.values() if node.op == "ReadVariableOp"]
    for assignment in [node for node in nodes.values() if node.op.startswith("Assign")]:
        earlier = before(assignment)
        for read in [node for node in reads if node.input[0] == assignment.input[0]]:
            if read.name not in earlier and assignment.name not in before(read):
                yield assignment.name, read.name
