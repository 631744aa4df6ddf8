"""The captured model: tracing, guards, node facts and regions."""
