"""Commands about a server that runs: they load no model and open no store."""
