"""Online mode: a program outside of the run opens sessions at the endpoint, plays them, and rewards
them itself."""
