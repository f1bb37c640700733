"""What a model costs on a machine: step times, memory, capacity. Formulas and fits; no torch and no clock."""
