"""Models as judges, and their agreement with people."""
