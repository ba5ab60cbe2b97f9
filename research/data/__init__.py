"""Text to global batches: corpus -> tokenizers -> tokens -> batches, in reading order."""
