"""The benchmark behind scripts/bench: what sections share at the bottom, one file per section, the page on top."""
