"""Training on what was recorded or written."""
