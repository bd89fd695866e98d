"""The fleet: replicas on Ray, the stores that they share, and the ranks of one model."""
