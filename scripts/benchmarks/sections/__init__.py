"""One file per section of the page: `collect` measures in worker processes, `section` writes the figures."""
