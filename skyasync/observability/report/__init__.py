"""A page about a run: ``report.html``, one file that needs neither network nor scripts.

Invariant: it is made of what the run's folder holds at that moment, so it can be made while the run
continues; what is not there is named together with what would fill it. A page that cannot be made
is a warning, never the run's error.
"""
