"""Jobs of Hugging Face's Trainer, in ranks of the harness."""
