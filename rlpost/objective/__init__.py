"""The objective: pure functions over flat tensors. Knows no config, no engine, no process group.

A loss gives a per-token value, a reducer a per-token weight; the step's loss is their product, summed over
micro-batches and ranks (`objective.py`). Nothing else divides.
"""
