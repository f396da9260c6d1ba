"""Around each tool call: what it may do, what it changed, and what it must not carry away."""
