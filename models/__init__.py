"""What a model is: configuration, weights, rotary embedding, decoder, tokenizer, chat template, where to get it."""
