"""Names of other systems, for code that was written for them: only its imports change."""
