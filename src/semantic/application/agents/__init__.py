"""The agents of a served model: finds each request's agent, and reports each agent's state."""
