"""The trainer: `train/imagenet.py` and the modules it reads from."""
