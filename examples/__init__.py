"""Recipes for the library: each folder is one, runnable from the repository's root."""
