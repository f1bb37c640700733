"""The cost of a model on a machine: step times, memory, capacity. Formulas and fits; no torch and no clock.

cost_model   the fitted step-time model             fit, profile   from measured steps to a model, as a file
hardware     devices as data, this machine too      presets        models by name, without a download
split        a model cut over devices               memory         bytes by class, on each device
roofline     seconds of a step on any device, with constants fitted on measured points
estimate     TTFT, TPOT, throughput and cost        advise         how to cut a model, and why
capacity     all of it for one question             explain        the figures with their formulas
"""
