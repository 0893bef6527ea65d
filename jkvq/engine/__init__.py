"""From prompts to text: batches, compiled steps, sampling, text."""
