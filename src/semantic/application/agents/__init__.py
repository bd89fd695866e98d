"""The agents of a served model: the agent of each request, and the state of each agent."""
