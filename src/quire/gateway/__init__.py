"""In front of the replicas: which replica serves a request. Pure routing policies, without I/O."""
