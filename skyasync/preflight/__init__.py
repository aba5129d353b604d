"""What can be known of a run before any process starts: found here, in one line, or not at all.

Invariant: nothing here starts a process, imports torch or leaves anything behind; the cheapest
questions come first.
"""
