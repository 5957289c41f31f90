"""Live jobs of plain loops with Hugging Face Accelerate, and their comparison with jobs that lose nobody."""
