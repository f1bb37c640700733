"""gate × order × budget: which sequences enter, in what order, and how many tokens a step computes."""
