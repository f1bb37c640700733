"""In front of the replicas: who serves a request. The routing is pure; the gateway's HTTP part calls it."""
