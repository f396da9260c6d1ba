"""The program that runs inside a sandbox: it starts commands, moves files, kills and wipes.

`launch.compiled()` is that program as a zip archive, which `launch.starting()` starts with a stream
to the host on stdin and stdout, as process 1 of a pid namespace where there is one. It needs
nothing that Debian's python3-minimal lacks; `resource` and `ctypes` are used where they exist, and
`hello` reports what is in force. When stdin ends, it ends, and everything it started. Nothing here
imports the rest of agentrl.
"""
