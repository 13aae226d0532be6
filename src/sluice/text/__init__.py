"""Text in and out: token ids, streamed text, chat templates, sampling. Knows nothing of models, files or weights."""
