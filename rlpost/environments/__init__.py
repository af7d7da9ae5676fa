"""Environments: who answers the model between its turns."""
