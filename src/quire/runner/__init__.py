"""The worker: keeps the state of its sequences, turns a `StepPlan` into tensors, computes, samples."""
