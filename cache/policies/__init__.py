"""Eviction policies, one small file each."""
