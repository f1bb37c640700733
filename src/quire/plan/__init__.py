"""What a model costs on a machine: step times, memory, capacity. Formulas and fits; no torch and no clock.

cost_model   the fitted step-time model             fit, profile   from measured steps to one
hardware     devices as data, with sources          presets        models by name, without a download
split        a model cut over devices               memory         bytes by class, on each device
roofline     seconds of a step on any device        efficiency     constants fitted on measured points
estimate     TTFT, TPOT and throughput of a load    advise         how to cut a model, and why
cost         USD a million tokens
"""
