"""A package that takes 8 MiB of the C heap when it is imported."""

TABLE = bytearray(8 << 20)
