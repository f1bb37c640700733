"""Binary multiples of a byte, what a token id takes, and the size of the pieces that long data is worked on in."""

import sys
from struct import calcsize

MIB = 1 << 20
GIB = 1 << 30
# An id in a tuple or list: a Python integer and the pointer to it.
POINTER_BYTES = calcsize("P")
ID_BYTES = sys.getsizeof(1 << 16) + POINTER_BYTES
# Long data is read, copied, compared and decoded in pieces of this size, which stay in the cache of a core.
PIECE_BYTES = 1 << 20
