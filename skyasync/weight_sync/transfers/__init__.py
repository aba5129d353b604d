"""The ways by which weights travel; each file has both ends of one."""
