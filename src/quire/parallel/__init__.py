"""Which rank of a group holds and computes what: pure maths, torch-free."""
