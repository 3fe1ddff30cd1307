"""Commands of the command line, one function each; `prunekit/cli.py` collects them."""
