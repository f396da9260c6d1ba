"""Recipes and what they are made of: pure functions over a batch and what the policy says of it."""
