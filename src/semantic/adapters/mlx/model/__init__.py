"""Model loading: finds, loads and fingerprints models."""
