"""What people look at: the page of a run, its curves and warning signs, progress on the terminal."""
