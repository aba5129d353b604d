"""SGLang's servers as engines."""
