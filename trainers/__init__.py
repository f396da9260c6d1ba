"""From groups to gradients; the only room, beside the transformers engine, that imports torch."""

if __name__ == "trainers":
    raise ImportError("import agentrl.trainers, not trainers")
