"""Evaluation: statistics over finished episodes, and the page that shows a run."""
