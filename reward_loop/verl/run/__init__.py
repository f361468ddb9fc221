"""What a run consists of: the task runner, the job's actor, reward models and the nodes for them."""
