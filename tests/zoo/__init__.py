"""Public model zoos, run through fxspeed by `python -m tests.zoo`."""
