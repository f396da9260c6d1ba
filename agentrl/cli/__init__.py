"""The command line, one file a command. `agentrl.cli.app.main` is the program."""
