"""Rollout engines: prompts in, sampled completions out, behind one protocol (`engine.py`)."""
