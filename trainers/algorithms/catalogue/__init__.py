"""What recipes are made of, by name, and what is told of them."""
