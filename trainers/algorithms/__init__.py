"""Recipes and what they are made of: pure functions over a batch and the policy's output."""
