"""One file per row of docs/benchmarks.md: `python -m benchmarks [NAME]` measures all of them, or
one.
"""
