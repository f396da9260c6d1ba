"""What the agent meets: one folder or file per task family."""

if __name__ == "envs":
    raise ImportError("import agentrl.envs, not envs")
