"""Hidden tests of programs."""
