"""One address before many servers: tenants and their limits, routing, retries, books, scaling."""
