"""The agents of a served model: which one a request belongs to, and what is known of each."""
