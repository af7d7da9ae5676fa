"""Reward functions, and how several make one reward (`combine.py`)."""
