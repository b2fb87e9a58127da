"""DALI graphs: readers, decoding and random operations; installed as ``fastmoll.pipelines``."""

MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's red, green and blue, for pixels in [0, 1]."""
STD = (0.229, 0.224, 0.225)
"""Their standard deviation."""
