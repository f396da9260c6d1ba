"""Experiments behind what the documents say: minutes to hours each, never part of the tests."""
