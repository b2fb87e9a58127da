"""How a trained network holds up on corrupted images: sets, loaders, checkpoints, results."""
