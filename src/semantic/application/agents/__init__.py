"""The agents of a served model: which one a request belongs to, and the state of each."""
