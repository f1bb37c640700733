"""The old name of `quire_gateway`, kept for imports of users."""
