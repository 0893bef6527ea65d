"""OpenAI's requests and answers, as batches and the server have them."""
