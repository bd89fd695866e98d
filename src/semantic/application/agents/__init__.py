"""The agents of a served model: the agent that a request belongs to, and the state of each
agent."""
