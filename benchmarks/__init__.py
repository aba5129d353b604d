"""Measurements: ratios within one run, medians, and what limits each figure."""
