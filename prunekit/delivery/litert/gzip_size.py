"""Size of files and weights after gzip, without writing the compressed data."""

import zlib
from collections.abc import Iterable


def gzip_size(blocks: Iterable[bytes]) -> int:
    """Returns the number of bytes of the joined blocks after `gzip -9`."""
    # 31: the largest window, with gzip's header and checksum.
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    return sum(len(compressor.compress(block)) for block in blocks) + len(compressor.flush())
