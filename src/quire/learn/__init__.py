"""The old name of `quire_lab.learn`, kept for imports of users."""
