"""A `trl.GRPOConfig` as settings of ours."""
