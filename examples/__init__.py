"""Recipes beside the library: each folder is one, runnable from the repository's root."""
