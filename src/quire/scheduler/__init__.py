"""gate × order × budget: who may enter, who comes first, how many rows a step computes (DESIGN §4)."""
