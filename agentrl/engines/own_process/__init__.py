"""An engine in a process of its own: it may be killed, and the run goes on."""
