"""Model loading: find, load and fingerprint a model."""
