"""What runs in verl's trainer: the modes, the batch with its rewards, metrics, and the return after a stop."""
