"""The shipped environments: one module or folder per task family."""

if __name__ == "envs":
    raise ImportError("import agentrl.envs, not envs")
