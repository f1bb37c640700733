"""Binary multiples of a byte, and the size of the pieces that long data is worked on in."""

MIB = 1 << 20
GIB = 1 << 30
# Long data is read, copied, compared and decoded in pieces of this size, which stay in the cache of a core.
PIECE_BYTES = 1 << 20
