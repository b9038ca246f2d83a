"""Running a model: prefill, decode, attention, sampling, text, sessions."""
