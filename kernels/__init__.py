"""Operations on batches of images and labels, one file each: definition, checks and reference in plain torch."""
