"""What a token is drawn from besides the model's scores."""
