"""What is kept: arena, budget, scores, cascade, policies."""
