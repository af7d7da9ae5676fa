"""Sweeps: arms over seeds, and what can be concluded from them."""
