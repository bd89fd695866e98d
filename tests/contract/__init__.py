"""One file per port: what every implementation must do, fakes included."""
