"""Models: loaded, scored, trained in part or whole, sharded, or made on the spot."""
