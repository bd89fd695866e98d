"""The HTTP edge: a served model behind the wires that agents speak. Knows no model framework."""
