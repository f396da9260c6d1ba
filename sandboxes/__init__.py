"""Where untrusted code runs: one protocol, several backends, and the contract they all pass."""

if __name__ == "sandboxes":
    raise ImportError("import agentrl.sandboxes, not sandboxes")
