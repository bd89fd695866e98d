"""Parts of the composition root: settings, models by name, shares of memory, stores."""
