"""Counting discs in images with a tiny vision-language model made on this machine."""
