"""Parts of the data of a run, and one module for each kind of source that reads them."""
