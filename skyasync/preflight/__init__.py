"""Checks of a run before any process starts: the first problem is an error of one line.

Invariant: no check starts a process, imports torch or leaves a file. The cheapest come first.
"""
