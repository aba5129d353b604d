"""Online mode: a separate program plays sessions at the endpoint, and rewards them itself."""
