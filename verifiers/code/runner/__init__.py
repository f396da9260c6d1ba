"""What runs inside the grader sandbox. These files import nothing but the standard library and each
other.

`judge` holds what is hidden and decides; `child` holds the candidate and only answers calls;
`codec` is all that passes between them, and between the judge and the host.
"""
