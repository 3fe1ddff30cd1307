"""`python -m prunekit` is the command line."""

from prunekit.cli import main

if __name__ == "__main__":
    main()
