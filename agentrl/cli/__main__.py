"""`python -m agentrl.cli` is the program `agentrl`."""

from agentrl.cli.app import main

main()
