"""Comparing eviction policies: one prefill per prompt, then every policy and budget on what it left."""
