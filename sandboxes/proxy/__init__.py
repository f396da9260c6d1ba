"""The filtering proxy of a sandbox with a network: a program of its own, in a container of its own.

It runs with the standard library alone, from the archive that also holds the supervisor, and
imports nothing else.
"""
