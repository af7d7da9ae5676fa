"""Engines import on as they are made, and collect garbage as they go."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _frozen_again() -> None:
    gc.freeze()
