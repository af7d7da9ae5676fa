"""The way from task rows to prompts, and from rollouts to micro-batches."""
