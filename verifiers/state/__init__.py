"""What had to be called, and what files and tables had to become."""
