"""What people look at: the page of a run, its warning signs, progress on the terminal."""
