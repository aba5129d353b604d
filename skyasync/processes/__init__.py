"""Processes for the user's code: environments, agent programs and reward functions.

``Pool`` keeps a number of processes at work: it starts them, shares the work out, and replaces those that are lost or
stuck. What it keeps is either a ``Link``, to a ``Host`` that carries out many calls at once (in a Ray actor, or here),
or an ``Apart``, a child that calls one function at a time and is killed when that takes too long.

Invariant: every call ends, with its result or with an error that names its cause; the user's files are loaded once in
every process, before the first call and outside of every call's limit.
"""
