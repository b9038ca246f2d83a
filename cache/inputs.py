"""The inputs that a method can ask for by name. Keys and positions of a layer are always there. No torch here."""

from __future__ import annotations

from .method import Input

INPUTS = {
    one.name: one
    for one in (
        Input("window_queries", "the last w rotated queries of each head", "kept in a ring, nothing else"),
        Input("values", "the layer's values", "none: they are staged"),
        Input("carried", "what the method left with each held row when it scored it last", "4 bytes a row"),
        Input("output_projection", "the matrix that brings the heads' results together", "none: the layer's own"),
        Input("column_sums", "attention that each token got from all queries", "one more Q K^T, in tiles", True),
        Input("column_squares", "the squares of that attention, summed", "one more Q K^T, in tiles", True),
        Input(
            "query_mean", "mean of all queries before rotation, but for the first 4 tokens'", "n D per query head", True
        ),
        Input("query_covariance", "their covariance", "n D^2 products per query head", True),
        Input("rotation", "cosines and sines of any position", "none"),
        Input("hidden_states", "the normed input of attention of every new token", "n x hidden numbers more", True),
        Input("hidden_similarity", "mean cosine of the hidden states around attention", "two norms a token", True),
        Input("token_ids", "every id that was fed", "none"),
        Input("separators", "ids of tokens that end a clause or a line", "one pass over the vocabulary"),
    )
}
