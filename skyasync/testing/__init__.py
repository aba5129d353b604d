"""Tools for trying what a run of one's own survives."""
