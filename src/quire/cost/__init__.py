"""What a step costs on a machine: times, bytes, devices. Formulas and fits; no torch and no clock.

The scheduler, the gateway's autoscaler, the planner and the simulator predict with it.

cost_model   the fitted step-time model             fit, profile   from measured steps to a model, as a file
hardware     devices as data, this machine too      presets        models by name, without a download
split        a model cut over devices               ranks          what each rank holds and sends
roofline     seconds of a step on any device, with constants fitted on measured points (efficiency)
links        transfers between devices              speculation    what drafting adds (draft_cost: its times)
"""
