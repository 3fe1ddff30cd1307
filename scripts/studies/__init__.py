"""Studies of accuracy: long measurements whose results are kept, so that they can be interrupted and extended."""
