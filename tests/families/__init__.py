"""Every family of models: its template, its answers and the conversations that clients send."""
