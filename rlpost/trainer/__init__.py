"""The trainer: an FSDP2 model, its updates and its checkpoints."""
