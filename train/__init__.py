"""The trainers: `train/imagenet.py`, `train/small_images.py`, and the modules they share."""
