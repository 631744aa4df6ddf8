"""The training step."""

from fxspeed.train.step import TrainStep

__all__ = ["TrainStep"]
