"""Training on what the policy plays: the loop, its parts and its folder."""
