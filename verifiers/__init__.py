"""A finished episode in, a Score out."""

if __name__ == "verifiers":
    raise ImportError("import agentrl.verifiers, not verifiers")
