"""Binary multiples of a byte, the bytes of a token id, and the size of the pieces that long data is worked on in."""

import sys
from struct import calcsize

MIB = 1 << 20
GIB = 1 << 30
# An id in a tuple: a Python integer and the pointer to it.
ID_BYTES = sys.getsizeof(1 << 16) + calcsize("P")
# Long data is read, copied, compared and decoded in pieces of this size, which stay in the cache of a core.
PIECE_BYTES = 1 << 20
