"""DALI graphs: readers, decoding and random operations; installed as ``fastmoll.pipelines``."""
