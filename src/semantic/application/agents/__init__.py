"""The agents of a served model: their names, states and footprints."""
