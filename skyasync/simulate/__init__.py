"""The same plans in simulation: what a plan would cost on a cluster, and whether it deadlocks."""
