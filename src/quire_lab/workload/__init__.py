"""What is asked of a server: when requests arrive, how long they are, what they share."""
