"""Joining or starting Ray, placement, devices."""
