"""The same plans on virtual time: what a plan would cost on a cluster, and whether it can jam."""
