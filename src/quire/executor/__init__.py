"""What turns a `StepPlan` into a `StepResult`."""
