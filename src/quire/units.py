"""Binary multiples of a byte."""

MIB = 1 << 20
GIB = 1 << 30
